"""From a serial parameter to this rank's shard of it, in place; of one that is still in a file only that is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_tp.grid.layout import Layout
from axonn_tp.grid.lazy import LazyTensor, forget
from axonn_tp.grid.mesh import Grid, Mesh
from axonn_tp.grid.regions import regions

_MOST_BYTES = 2**25


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


def without_own(model: nn.Module) -> list[nn.Module]:
    """The modules whose buffers are the same on all ranks: all but those, such as an expert, whose every parameter is laid out already."""
    own = {
        id(inner)
        for module in model.modules()
        if (held := list(module.parameters())) and all(hasattr(parameter, "axonn_layout") for parameter in held)
        for inner in module.modules()
    }
    return [module for module in model.modules() if id(module) not in own]


@torch.no_grad()
def broadcast_buffers(modules: Iterable[nn.Module], mesh: Mesh) -> None:
    """Give buffers the first rank's values, as parameters have them: some are drawn, as random features and the vectors of spectral norms.

    Args:
        modules: whose own buffers are the same on all ranks, in the same order.
        mesh: the mesh.
    """
    if mesh.size("grid") == 1:
        return
    found = {id(buffer): buffer for module in modules for buffer in module._buffers.values() if _is_sent(buffer)}
    for members in _filled(found.values()):
        held = [buffer.detach().contiguous().reshape(-1).view(torch.uint8).to(mesh.device) for buffer in members]
        flat = torch.cat(held)
        dist.broadcast(flat, group=mesh.group("grid"), group_src=0)
        for buffer, mine, first in zip(members, held, flat.split([one.numel() for one in held]), strict=True):
            if not torch.equal(mine, first):
                buffer.data = first.clone().view(buffer.dtype).view(buffer.shape).to(buffer.device)


def _is_sent(buffer: Tensor | None) -> TypeGuard[Tensor]:
    return type(buffer) is Tensor and buffer.layout is torch.strided and not buffer.is_meta and buffer.numel() > 0


def _filled(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors that go in one call."""
    calls: list[Tensor] = []
    for tensor in tensors:
        if calls and sum(one.nbytes for one in calls) + tensor.nbytes > _MOST_BYTES:
            yield calls
            calls = []
        calls.append(tensor)
    if calls:
        yield calls


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
