"""From the shards of all ranks to the serial model's tensors, one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_tp.checkpoint.dealt import DealtNames
from axonn_tp.grid.layout import Layout, layout_of
from axonn_tp.grid.mesh import Mesh
from axonn_tp.grid.regions import regions
from axonn_tp.layers.exports import as_shards


@torch.no_grad()
def full_state_dict(model: nn.Module, mesh: Mesh, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The serial model's state_dict on the CPU of rank 0; every rank calls it.

    Args:
        model: a model that `parallelize` split.
        mesh: its mesh.
        dtype: of the floating-point tensors; theirs when None.

    Returns:
        Whole tensors by the serial model's names on rank 0, with what else modules keep (extra states); nothing on the others.
    """
    found: dict[str, Any] = dict(whole_tensors(model, mesh, dtype))
    if dist.get_rank() == 0:
        with as_shards():
            held = model.state_dict(keep_vars=True)
        found |= {name: value for name, value in held.items() if not isinstance(value, Tensor)}
    return found


def whole_tensors(model: nn.Module, mesh: Mesh | None, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """The serial model's tensors one after the other, on rank 0's CPU, in memory of their own; nothing on the others.

    A parameter that layers share is one tensor.

    Args:
        model: a model that `parallelize` split, or a serial one.
        mesh: its mesh; None for a serial model.
        dtype: of the floating-point tensors; theirs when None.
    """
    first = mesh is None or dist.get_rank() == 0
    with as_shards():
        held = model.state_dict(keep_vars=True)
    uses, shared, names = Counter(map(id, held.values())), dict[int, list[Tensor]](), DealtNames(model)
    for name, value in held.items():
        if not isinstance(value, Tensor):
            continue
        if id(value) not in shared:
            wholes = [value.detach()]
            if mesh is not None and layout_of(value).axes:
                shards = [torch.empty_like(wholes[0]) for _ in range(mesh.grid.world)] if first else None
                dist.gather(wholes[0].contiguous(), shards, dst=0)
                wholes = wholes if shards is None else assemble(shards, layout_of(value), mesh)
            wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
            wholes = [whole.to("cpu", wanted, copy=whole.data_ptr() == value.data_ptr()) for whole in wholes if first]
        else:
            wholes = shared[id(value)]
        for home, whole in enumerate(wholes):
            yield names.outward(name, home), whole
        if uses[id(value)] > 1:
            shared[id(value)] = wholes


def assemble(shards: list[Tensor], layout: Layout, mesh: Mesh) -> list[Tensor]:
    """The serial tensors from the local ones of all ranks, in rank order: one for each home."""
    grid = layout.grid or mesh.grid
    wholes = [shards[0].new_empty(layout.serial_shape) for _ in range(layout.homes(grid))]
    for rank, shard in enumerate(shards):
        at = grid.coordinates(rank)
        whole = wholes[layout.home_at(grid, at)]
        if layout.counted_here(at, ("x", "y", "z", "data")):
            for region in regions(layout, grid, at):
                whole[region.cut] = region.view(shard.view(-1))
    return wholes
