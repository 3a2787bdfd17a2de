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

from axonn_tp import Mesh
from plugins.config import ConfigError


def align_random_state(mesh: Mesh) -> None:
    """Give replicas the random state of the first of them, so that dropout draws the same masks."""
    if mesh.size("model") == 1:
        return
    on_cuda = mesh.device.type == "cuda"
    state: list[Any] = [
        torch.get_rng_state(),
        torch.cuda.get_rng_state(mesh.device) if on_cuda else None,
        random.getstate(),
        np.random.get_state(),  # noqa: NPY002  the legacy generator is the one scripts seed
    ]
    _broadcast_object(state, mesh)
    torch.set_rng_state(state[0])
    if on_cuda:
        torch.cuda.set_rng_state(state[1], mesh.device)
    random.setstate(state[2])
    np.random.set_state(state[3])


def _broadcast_object(objects: list[Any], mesh: Mesh) -> None:
    group = mesh.group("model")
    dist.broadcast_object_list(objects, src=dist.get_global_rank(group, 0), group=group)


def broadcast_inputs(inputs: tuple, keywords: dict[str, Any], mesh: Mesh) -> tuple[tuple, dict[str, Any]]:
    """The arguments of forward as the first replica has them.

    Raises:
        ConfigError: replicas call forward with arguments of different structure.
    """
    leaves, tree = tree_flatten((inputs, keywords))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    mine = (str(tree), [(tuple(t.shape), t.dtype) for t in tensors])
    heard = [mine]
    _broadcast_object(heard, mesh)
    if heard[0][0] != mine[0]:
        raise ConfigError(
            "ranks of one x-y plane call the model with differently built arguments; feed them the same batch, "
            "for example from a sampler over engine.mpu.get_data_parallel_rank()"
        )
    group = mesh.group("model")
    received = []
    for tensor, (shape, dtype) in zip(tensors, heard[0][1], strict=True):
        if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
            tensor = torch.empty(shape, dtype=dtype, device=tensor.device)
        elif mesh.rank("model"):
            tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        sent = tensor.detach().to(mesh.device).contiguous()
        dist.broadcast(sent, src=dist.get_global_rank(group, 0), group=group)
        received.append(tensor if mesh.rank("model") == 0 else sent)
    replaced = iter(received)
    return tree_unflatten([next(replaced) if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree)


def check_same_loss(loss: Tensor, mesh: Mesh) -> None:
    """Refuse to train when replicas, which computed the same thing, have different losses.

    Raises:
        ConfigError: on all ranks of the x-y plane alike.
    """
    value = loss.detach().double().mean().reshape(1)
    values = [torch.empty_like(value) for _ in range(mesh.size("model"))]
    dist.all_gather(values, value, group=mesh.group("model"))
    smallest, largest = min(v.item() for v in values), max(v.item() for v in values)
    if largest - smallest > 1e-3 * abs(largest) + 1e-6:
        raise ConfigError(
            f"ranks of one x-y plane have losses from {smallest:.6g} to {largest:.6g} though they computed the same model; their batches or labels "
            "differ: pass labels through the model's forward, or read data by engine.mpu.get_data_parallel_rank()"
        )


_active: list[Mesh] = []


def share_samplers(mesh: Mesh) -> None:
    """Make torch's DistributedSampler, where it splits over all ranks, split over those that read different data."""
    _active[:] = [mesh]
    if getattr(DistributedSampler, "axonn", False):
        return
    DistributedSampler.axonn = True  # type: ignore[attr-defined]
    for name in ("__iter__", "__len__"):
        setattr(DistributedSampler, name, _adjusted(getattr(DistributedSampler, name)))


def stop_sharing_samplers() -> None:
    """Leave DistributedSampler alone again."""
    _active.clear()


def _adjusted(original: Any) -> Any:
    def method(self: DistributedSampler) -> Any:
        if _active and _active[0].size("model") > 1:
            _adjust(self, _active[0])
        return original(self)

    return method


def _adjust(sampler: DistributedSampler, mesh: Mesh) -> None:
    if (sampler.num_replicas, sampler.rank) != (dist.get_world_size(), dist.get_rank()):
        return
    sampler.num_replicas, sampler.rank = mesh.size("batch"), mesh.rank("batch")
    length = len(sampler.dataset)  # type: ignore[arg-type]
    if sampler.drop_last and length % sampler.num_replicas:
        length -= sampler.num_replicas - 1
    sampler.num_samples = math.ceil(length / sampler.num_replicas)
    sampler.total_size = sampler.num_samples * sampler.num_replicas
