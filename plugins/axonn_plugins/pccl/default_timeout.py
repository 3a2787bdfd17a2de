"""Timeouts of groups of pccl: of those that are made without one that of the group of all ranks, where torch has its own default; and another one later."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any


def timeout_of(backend: Any) -> timedelta | None:
    """The timeout of a group's collectives; None where its backend does not tell."""
    planner = _planner(backend) if backend.name() == "pccl" else None
    if planner is not None:
        return timedelta(seconds=planner.timeout)
    return getattr(getattr(backend, "options", None), "_timeout", None)


def _unwrapped(backend: Any) -> Any:
    """Without the wrapper that TORCH_DISTRIBUTED_DEBUG=DETAIL puts around it."""
    return getattr(backend, "wrapped_pg", backend)


def _planner(backend: Any) -> Any:
    """A group's; None where gloo is behind it, as beside a GPU with the algorithm "native"."""
    from axonn_plugins.pccl.build import load

    try:
        return load().planner(_unwrapped(backend))
    except RuntimeError:
        return None


def _set(backend: Any, timeout: timedelta) -> None:
    _unwrapped(backend).set_timeout(timeout)
    planner = _planner(backend)
    if planner is not None:
        planner.timeout = timeout.total_seconds()


def install() -> None:
    """Have torch give it to groups of pccl, and `_set_pg_timeout` know them; with all others both are torch's own."""
    import torch.distributed.distributed_c10d as c10d  # torch.distributed itself may not be there in full yet

    theirs = c10d._get_default_timeout
    if getattr(theirs, "of_pccl", False):
        return

    @functools.wraps(theirs)
    def default_timeout(backend: Any) -> timedelta:
        if "pccl" not in str(backend) or not c10d.is_initialized():
            return theirs(backend)
        world = c10d._get_default_group()
        return timeout_of(world._get_backend(world._device_types[0])) or theirs(backend)

    default_timeout.of_pccl = True  # type: ignore[attr-defined]
    c10d._get_default_timeout = default_timeout
    others = c10d._set_pg_timeout

    @functools.wraps(others)
    def set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
        of = group or c10d._get_default_group()
        backends = [of._get_backend(device) for device in of._device_types] if isinstance(of, c10d.ProcessGroup) else []
        ours = [backend for backend in backends if backend.name() == "pccl" and hasattr(backend, "set_timeout")]
        for backend in ours:
            _set(backend, timeout)
        if not ours or len(ours) < len(backends):
            others(timeout, group)

    c10d._set_pg_timeout = set_pg_timeout
