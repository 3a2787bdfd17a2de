"""From a serial parameter to this rank's shard of it, in place; of one that is still in a file only that is read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_tp.grid.layout import Layout
from axonn_tp.grid.lazy import LazyTensor, forget
from axonn_tp.grid.mesh import Grid, Mesh
from axonn_tp.grid.regions import regions


@torch.no_grad()
def distribute(
    parameter: nn.Parameter, layout: Layout, grid: Grid, coordinates: Mapping[str, int], device: torch.device
) -> None:
    """Replace a full parameter's data by this rank's shard, in place, so that optimizers keep hold of it.

    A parameter that two layers share is distributed once. Of one that is still in a file only the shard is read.

    Args:
        parameter: the parameter.
        layout: how it is to lie on the grid.
        grid: the grid.
        coordinates: the rank's place on every axis.
        device: where the shard of one in a file is to be; else it stays where the parameter is.

    Raises:
        ValueError: two layers share the parameter but lay it out differently.
    """
    present = getattr(parameter, "axonn_layout", None)
    if present is None:
        if isinstance(parameter, LazyTensor):
            parameter.turn_into(_read_shard(parameter, layout, grid, coordinates).to(device))
        else:
            parameter.data = layout.shard(parameter.data, grid, coordinates)
        parameter.axonn_layout = layout  # type: ignore[attr-defined]
    elif present != layout:
        raise ValueError(f"two layers share a parameter but split it differently: {present} and {layout}")


def _read_shard(lazy: LazyTensor, layout: Layout, grid: Grid, coordinates: Mapping[str, int]) -> Tensor:
    flat = torch.zeros(layout.local_numel(grid), dtype=lazy.dtype)
    for region in regions(layout, grid, coordinates):
        region.view(flat).copy_(lazy.source.read(region.cut))
    forget()
    return flat if layout.over_z and grid.gz > 1 else flat.view(layout.block_shape(grid))


def broadcast(parameter: nn.Parameter, mesh: Mesh) -> None:
    """The first rank's values, on the mesh's device: NCCL sends nothing from the CPU, where a model is often built."""
    if mesh.size("grid") > 1 and parameter.numel() and not isinstance(parameter, LazyTensor):
        whole = parameter.data.to(mesh.device).contiguous()
        dist.broadcast(whole, group=mesh.group("grid"), group_src=0)
        parameter.data = whole


def agree_on_unread(model: nn.Module, mesh: Mesh) -> None:
    """Make plain tensors of the parameters that are not on every rank in the same file; every rank calls it.

    One may have been used on some ranks, and is in memory there: rank 0's values will be sent, as of any that is.
    """
    parameters = list(model.parameters())
    unread = torch.tensor([p.unread if isinstance(p, LazyTensor) else 0 for p in parameters])
    extremes = torch.stack([unread, -unread]).to(mesh.device)
    if mesh.size("grid") > 1:
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.group("grid"))
    largest, smallest = extremes.cpu()
    for parameter, same in zip(parameters, (largest == -smallest).tolist(), strict=True):
        if isinstance(parameter, LazyTensor) and not (same and parameter.unread):
            parameter.turn_into(parameter.source.hold())


@torch.no_grad()
def read_rest(module: nn.Module, device: torch.device) -> None:
    """Read what of a module's own tensors is not split, whole."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if isinstance(tensor, LazyTensor):
            tensor.turn_into(tensor.source.read().to(device))
