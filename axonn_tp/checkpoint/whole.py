"""From the shards of all ranks to the serial model's tensors, one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_tp.grid.layout import Layout, layout_of
from axonn_tp.grid.mesh import Mesh
from axonn_tp.grid.regions import regions
from axonn_tp.layers.exports import as_shards


@torch.no_grad()
def full_state_dict(model: nn.Module, mesh: Mesh, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The serial model's state_dict on the CPU of rank 0; every rank calls it.

    Args:
        model: a model that `parallelize` split.
        mesh: its mesh.
        dtype: of the floating-point tensors; theirs when None.

    Returns:
        Whole tensors by the serial model's names on rank 0, nothing on the others.
    """
    return dict(whole_tensors(model, mesh, dtype))


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
    uses, shared = Counter(map(id, held.values())), dict[int, Tensor]()
    for name, value in held.items():
        if not isinstance(value, Tensor):
            continue
        if id(value) in shared:
            if first:
                yield name, shared[id(value)]
            continue
        whole = value.detach()
        if mesh is not None and layout_of(value).axes:
            shards = [torch.empty_like(whole) for _ in range(mesh.grid.world)] if first else None
            dist.gather(whole.contiguous(), shards, dst=0)
            whole = assemble(shards, layout_of(value), mesh) if shards is not None else whole
        if first:
            wanted = dtype if dtype is not None and whole.is_floating_point() else whole.dtype
            whole = whole.to("cpu", wanted, copy=whole.data_ptr() == value.data_ptr())
            yield name, whole
        if uses[id(value)] > 1:
            shared[id(value)] = whole


def assemble(shards: list[Tensor], layout: Layout, mesh: Mesh) -> Tensor:
    """The serial tensor from the local ones of all ranks, in rank order."""
    whole = shards[0].new_empty(layout.serial_shape)
    for rank, shard in enumerate(shards):
        at = mesh.grid.coordinates(rank)
        if layout.counted_here(at, ("x", "y", "z", "data")):
            for region in regions(layout, mesh.grid, at):
                place = tuple(slice(a, a + n) for a, n in zip(region.offsets, region.sizes, strict=True))
                whole[place] = region.view(shard.view(-1))
    return whole
