"""Megatron's collectives of CPU tensors by PCCL: the group of all ranks is given to it before others are made, which inherit it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from megatron.core import parallel_state

from axonn_plugins.config import ConfigError, Pccl
from axonn_plugins.hosts.megatron import cpu
from axonn_plugins.hosts.megatron.arguments import fail
from axonn_plugins.hosts.megatron.originals import Originals
from axonn_plugins.pccl import world
from axonn_plugins.pccl.build import BuildError
from axonn_plugins.pccl.links import LinkError

_originals = Originals()


def install(block: Pccl) -> None:
    """Have the next `parallel_state.initialize_model_parallel` exchange the backend first; the last block counts."""
    _originals.restore()
    _originals.wrap(parallel_state, "initialize_model_parallel", lambda original: _by_pccl(original, block))


def _by_pccl(original: Callable[..., None], block: Pccl) -> Callable[..., None]:
    @wraps(original)
    def initialize_model_parallel(*args: Any, **named: Any) -> None:
        try:
            world.take(block.options(), "cpu" if cpu.enabled() else "cuda")
        except (BuildError, LinkError, ValueError) as error:
            fail(ConfigError(f"--axonn-pccl: {str(error).removeprefix('pccl: ')}"))
        original(*args, **named)

    return initialize_model_parallel


def uninstall() -> None:
    """Leave Megatron as it was before `install`; groups that were made stay."""
    _originals.restore()
