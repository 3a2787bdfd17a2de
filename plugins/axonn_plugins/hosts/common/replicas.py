"""Ranks that differ only in x and y compute on the same tokens: same batch, same random numbers, same loss."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data.distributed import DistributedSampler

from axonn_plugins.config import ConfigError
from axonn_tp import Mesh


def align_random_state(mesh: Mesh, ranks: str = "model") -> list[Any]:
    """Give replicas the random state of the first of them, so that dropout draws the same masks.

    Args:
        mesh: the mesh.
        ranks: the group of them.

    Returns:
        The state that this rank had, for `set_random_state`.
    """
    on_cuda = mesh.device.type == "cuda"
    own: list[Any] = [
        torch.get_rng_state(),
        torch.cuda.get_rng_state(mesh.device) if on_cuda else None,
        random.getstate(),
        np.random.get_state(),  # noqa: NPY002  the legacy generator is the one scripts seed
    ]
    if mesh.size(ranks) > 1:
        state, group = [*own], mesh.group(ranks)
        dist.broadcast_object_list(state, src=dist.get_global_rank(group, 0), group=group)
        set_random_state(state, mesh)
    return own


def set_random_state(state: list[Any], mesh: Mesh) -> None:
    """Draw from a state that a rank had."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], mesh.device)
    random.setstate(state[2])
    np.random.set_state(state[3])


def broadcast_inputs(inputs: tuple, keywords: dict[str, Any], mesh: Mesh) -> tuple[tuple, dict[str, Any]]:
    """The arguments of forward as the first replica has them.

    Raises:
        ConfigError: on all ranks that read the same samples, when their arguments differ in structure.
    """
    leaves, tree = tree_flatten((inputs, keywords))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    shapes = [tuple(t.shape) for t in tensors]
    structure = (str(tree), [(t.dtype, t.requires_grad) for t in tensors])
    group = mesh.group("replicas")
    everyone: list[Any] = [None] * mesh.size("replicas")
    dist.all_gather_object(everyone, (structure, shapes), group=group)
    if any(other != structure for other, _ in everyone):
        raise ConfigError(
            "ranks that read the same samples call the model with differently built arguments; feed them the same batch, "
            "for example from a sampler over engine.mpu.get_data_parallel_rank()"
        )
    received = []
    for tensor, shape in zip(tensors, everyone[0][1], strict=True):
        first = tensor.detach()
        if mesh.rank("replicas"):
            first = torch.empty(shape, dtype=tensor.dtype, device=mesh.device)
        first = first.to(mesh.device).contiguous()
        dist.broadcast(first, src=dist.get_global_rank(group, 0), group=group)
        if mesh.rank("replicas") == 0:
            first = tensor
        elif tensor.requires_grad and tensor.shape == first.shape:
            first = _Replace.apply(tensor, first)
        received.append(first)
    replaced = iter(received)
    return tree_unflatten([next(replaced) if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree)


class _Replace(torch.autograd.Function):
    """The first replica's values in the place of one's own, whose gradient they pass on."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, first: Tensor) -> Tensor:
        return first

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


_active: list[Mesh] = []


def share_samplers(mesh: Mesh) -> None:
    """Make torch's DistributedSampler, where it splits over all ranks, split over those that read different data."""
    _active[:] = [mesh]
    if getattr(DistributedSampler, "axonn", False):
        return
    DistributedSampler.axonn = True  # type: ignore[attr-defined]
    for name in ("__iter__", "__len__"):
        setattr(DistributedSampler, name, _adjusted(getattr(DistributedSampler, name)))


def stop_sharing_samplers(mesh: Mesh) -> None:
    """Leave DistributedSampler alone again, unless another mesh has it now."""
    if _active and _active[0] is mesh:
        _active.clear()


def _adjusted(original: Any) -> Any:
    def method(self: DistributedSampler) -> Any:
        if _active and _active[0].size("replicas") > 1:
            _adjust(self, _active[0])
        return original(self)

    return method


def _adjust(sampler: DistributedSampler, mesh: Mesh) -> None:
    if (sampler.num_replicas, sampler.rank) != (dist.get_world_size(), dist.get_rank()):
        return
    sampler.num_replicas, sampler.rank = mesh.size("readers"), mesh.rank("readers")
    length = len(sampler.dataset)  # type: ignore[arg-type]
    if sampler.drop_last and length % sampler.num_replicas:
        length -= sampler.num_replicas - 1
    sampler.num_samples = math.ceil(length / sampler.num_replicas)
    sampler.total_size = sampler.num_samples * sampler.num_replicas
