"""The timeout of collectives of the groups made here: that of the world.

torch gives a group that is made without a timeout 10 or 30 minutes by its backend, whatever the world was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def world_timeout(device: torch.device | str | None = None) -> timedelta:
    """The timeout of the world's collectives.

    Args:
        device: of the tensors that they are of; by default the first that the world has a backend for.
    """
    world = c10d._get_default_group()
    backend = world._get_backend(torch.device(world._device_types[0] if device is None else device))
    with suppress(AttributeError):
        return backend.options._timeout
    # Backends of others than torch tell nothing; pccl gives that of its world here.
    return c10d._get_default_timeout(dist.get_backend())


@contextmanager
def timeout_of_world() -> Iterator[None]:
    """Inside, a group that is made without a timeout has the world's, where that is not what torch gives by default."""
    theirs = c10d._get_default_timeout
    default = c10d.default_pg_nccl_timeout if dist.get_backend() == "nccl" else c10d.default_pg_timeout
    given = world_timeout()
    if given == default:
        yield
        return
    c10d._get_default_timeout = lambda backend: given  # type: ignore[assignment]
    try:
        yield
    finally:
        c10d._get_default_timeout = theirs
