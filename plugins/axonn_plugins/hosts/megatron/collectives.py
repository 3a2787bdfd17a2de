"""Megatron's collectives by PCCL: the group of all ranks is given to it before others are made, which inherit it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import StragglerDetector

from axonn_plugins.autoload import on_import
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
    _originals.wrap(StragglerDetector, "configure", _told_the_device)
    on_import("megatron.training.dist_signal_handler", _know_the_device)


def _device(local_rank: int | None = None) -> torch.device:
    """The device of the tensors whose collectives are PCCL's."""
    if cpu.enabled():
        return torch.device("cpu")
    return torch.device("cuda") if local_rank is None else torch.device("cuda", local_rank)


def _know_the_device(module: ModuleType) -> None:
    """Megatron asks all ranks whether one was sent a signal by tensors of a device that it knows by the names of NCCL and gloo alone."""
    _originals.replace(module, "get_device", _device)


def _told_the_device(original: Callable[..., None]) -> Callable[..., None]:
    """Megatron takes any other backend than NCCL for one of tensors in host memory, for which such a group may have none."""

    @wraps(original)
    def configure(self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        if self.dev is not None and not cpu.enabled():
            self.dev = torch.cuda.current_device()

    return configure


def _by_pccl(original: Callable[..., None], block: Pccl) -> Callable[..., None]:
    @wraps(original)
    def initialize_model_parallel(*args: Any, **named: Any) -> None:
        try:
            world.take(block.options(), _device().type)
        except (BuildError, LinkError, ValueError) as error:
            fail(ConfigError(f"--axonn-pccl: {str(error).removeprefix('pccl: ')}"))
        original(*args, **named)

    return initialize_model_parallel


def uninstall() -> None:
    """Leave Megatron as it was before `install`; groups that were made stay."""
    _originals.restore()
