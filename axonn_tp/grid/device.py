"""Which device a rank of a mesh computes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


def device_of_rank(device_type: str | None = None) -> torch.device:
    """This rank's device; a GPU that it finds for a script which has chosen none becomes the current one.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` or one GPU, ``"cuda:1"``. None: CUDA where there is a GPU and the process group moves its
            tensors by another backend than gloo, else the CPU.

    Raises:
        ValueError: the node has fewer GPUs than this rank's number on it.
    """
    device = torch.device(device_type if device_type is not None else _default())
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", _gpu())


def _default() -> str:
    backends = dict(part.split(":") for part in dist.get_backend_config().split(",") if ":" in part)
    return "cuda" if torch.cuda.is_available() and backends.get("cuda", "gloo") != "gloo" else "cpu"


def _gpu() -> int:
    """The process group's, the current one where the script has set it, or that of this rank's number on its node."""
    world = dist.group.WORLD
    bound = world.bound_device_id if world is not None else None
    if bound is None and torch.cuda.is_initialized() and torch.cuda.current_device() != 0:
        return torch.cuda.current_device()
    count = torch.cuda.device_count()
    place = bound.index if bound is not None else int(os.environ.get("LOCAL_RANK", dist.get_rank() % max(count, 1)))
    # One GPU in sight: the launcher has chosen it.
    index = 0 if count < 2 else place
    if index >= max(count, 1):
        raise ValueError(
            f'LOCAL_RANK = {place} has no GPU of its own, as this node has {count}; start {count} ranks a node, or give device_type = "cuda:N"'
        )
    torch.cuda.set_device(index)
    return index


@contextmanager
def made_where_not_split() -> Iterator[None]:
    """Inside, torch makes a mesh's groups where the world was told its device and its backend, such as pccl, has none split from it."""
    world = dist.group.WORLD
    bound = world.bound_device_id if world is not None else None
    if world is None or bound is None or world._get_backend(bound).supports_splitting:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound
