"""Flags that must be the same on all ranks, held against each other before groups are made: ranks with others would wait in other ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.common.agreement import meet
from axonn_plugins.hosts.common.fingerprint import Facts
from axonn_plugins.hosts.megatron.arguments import fail
from axonn_plugins.hosts.megatron.components import flag
from axonn_plugins.hosts.megatron.originals import Originals
from axonn_plugins.hosts.megatron.settings import LAYOUTS

_SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
)
_DEFAULTS = {
    **{"axonn_gx": 1, "axonn_gy": 1, "axonn_gz": 1, "axonn_layout": LAYOUTS[0], "axonn_overlap": ["all"]},
    **{"axonn_gather_cache": 0, "axonn_tune_matmuls": False},
}
"""Arguments of a grid."""
_originals = Originals()
_facts: dict[str, str] = {}


def install(args: Any) -> None:
    """Have the next `parallel_state.initialize_model_parallel` compare ranks first; the last arguments count.

    Args:
        args: Megatron's, validated, with flags of ours.
    """
    _facts.clear()
    _facts.update(facts_of(args))
    if not getattr(parallel_state.initialize_model_parallel, "agrees", False):
        _originals.wrap(parallel_state, "initialize_model_parallel", _agreed)


def uninstall() -> None:
    """Leave Megatron as it was before `install`."""
    _originals.restore()


def facts_of(args: Any) -> Facts:
    """The flags by which ranks compute together, as they are written, with what they say."""
    given = {**_DEFAULTS, **{name: value for name, value in vars(args).items() if value is not None}}
    names = _SIZES if "tensor_model_parallel_impl" not in given else (*_SIZES, *_DEFAULTS)
    found = {f"--{name.replace('_', '-')}": _written(given[name]) for name in names if name in given}
    texts = given.get("axonn_components", {})
    return found | {flag(key): json.dumps(json.loads(text), sort_keys=True) for key, text in texts.items()}


def _written(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)


def _agreed(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def initialize_model_parallel(*args: Any, **named: Any) -> None:
        if dist.get_backend() != "fake":
            try:
                meet(None, _facts)
            except ConfigError as error:
                fail(error)
        original(*args, **named)

    initialize_model_parallel.agrees = True  # type: ignore[attr-defined]
    return initialize_model_parallel
