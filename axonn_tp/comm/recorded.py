"""Code that selective activation checkpointing must not see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode


@contextmanager
def apart_from_checkpoints() -> Iterator[None]:
    """Inside, selective checkpointing records nothing: which weights are gathered in a pass depends on what is there already."""
    modes = _get_current_dispatch_mode_stack()
    others = [mode for mode in modes if not isinstance(mode, (_CachedTorchDispatchMode, _CachingTorchDispatchMode))]
    if len(others) == len(modes):
        yield
        return
    _exchange(modes, others)
    try:
        yield
    finally:
        _exchange(others, modes)


def _exchange(before: list[Any], after: list[Any]) -> None:
    for _ in before:
        _pop_mode()
    for mode in after:
        _push_mode(mode)
