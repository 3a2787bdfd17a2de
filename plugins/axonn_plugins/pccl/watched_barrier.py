"""``torch.distributed.monitored_barrier``, which torch refuses to any backend but gloo, for groups of pccl too."""

from __future__ import annotations

import functools
import sys
from datetime import timedelta
from typing import Any

from axonn_plugins.pccl.default_timeout import timeout_of


def install() -> None:
    """Have it take groups whose CPU backend is pccl; with all others it is torch's own."""
    import torch.distributed.distributed_c10d as c10d  # torch.distributed itself may not be there in full yet

    theirs = c10d.monitored_barrier
    if getattr(theirs, "of_pccl", False):
        return

    @functools.wraps(theirs)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> Any:
        member = group is not c10d.GroupMember.NON_GROUP_MEMBER and c10d.is_initialized()
        ours: Any = group or (c10d._get_default_group() if member else None)
        if not member or not _is_pccl(ours):
            return theirs(group, timeout, wait_all_ranks)
        if isinstance(timeout, float):
            timeout = timedelta(seconds=timeout)
        if timeout is None:
            timeout = timeout_of(ours._get_backend(_cpu()))
        return ours.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    monitored_barrier.of_pccl = True  # type: ignore[attr-defined]
    c10d.monitored_barrier = monitored_barrier
    whole = sys.modules["torch.distributed"]
    if hasattr(whole, "monitored_barrier"):
        whole.monitored_barrier = monitored_barrier  # type: ignore[attr-defined]


def _cpu() -> Any:
    import torch

    return torch.device("cpu")


def _is_pccl(group: Any) -> bool:
    try:
        return bool(group._get_backend(_cpu()).name() == "pccl")
    except RuntimeError:  # it has none for the CPU
        return False
