"""Coalescing blocks that end by an exception: torch's then goes on noting what its group calls, and nothing of that is ever done."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


def install() -> None:
    """Have torch's block leave groups of pccl as it found them; with all others it is torch's own."""
    import torch.distributed.distributed_c10d as c10d  # torch.distributed itself may not be there in full yet

    theirs = c10d._coalescing_manager
    if getattr(theirs, "of_pccl", False):
        return

    @contextmanager
    def block(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        of = group or c10d._get_default_group()
        outermost = of not in c10d._world.pg_coalesce_state
        try:
            with theirs(group, device, async_ops) as manager:
                yield manager
        except BaseException:
            if outermost and _is_pccl(of):
                _leave(of, device)
            raise

    def _leave(group: Any, device: Any) -> None:
        c10d._world.pg_coalesce_state.pop(group, None)
        if device:
            with suppress(RuntimeError):  # as the exception was, perhaps
                group._end_coalescing(device)

    coalescing_manager = functools.wraps(theirs)(block)
    coalescing_manager.of_pccl = True  # type: ignore[attr-defined]
    c10d._coalescing_manager = coalescing_manager
    whole = sys.modules["torch.distributed"]
    if hasattr(whole, "_coalescing_manager"):
        whole._coalescing_manager = coalescing_manager  # type: ignore[attr-defined]


def _is_pccl(group: Any) -> bool:
    return any(group._get_backend(device).name() == "pccl" for device in getattr(group, "_device_types", ()))
