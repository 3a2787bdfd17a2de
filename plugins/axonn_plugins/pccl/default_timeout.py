"""The timeout of groups of pccl that are made without one: that of the group of all ranks, where torch has its own default."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any


def timeout_of(backend: Any) -> timedelta | None:
    """The timeout of a group's collectives; None where its backend does not tell."""
    if backend.name() == "pccl":
        from axonn_plugins.pccl.build import load

        # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around it.
        return timedelta(seconds=load().planner(getattr(backend, "wrapped_pg", backend)).timeout)
    return getattr(getattr(backend, "options", None), "_timeout", None)


def install() -> None:
    """Have torch give it to groups of pccl; all others have torch's own."""
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
