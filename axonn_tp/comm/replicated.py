"""Gradients that replicas of a parameter have each computed, made those of the first.

Ranks along x or y that hold the same parameter, and use it on the same activations, have the same gradient of it: on a CPU to the bit. Kernels of
an accelerator may add up in another order in each call, flash attention's backward among them, and what an optimizer makes of that grows from step
to step. So there the first replica's gradients are sent to the others once a step, behind the sums over ranks and before clipping: a copy, which
rounds nothing. Where torch is told to be deterministic, the same on all ranks (`agree_on_bits`), nothing is sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_tp.grid.layout import layout_of
from axonn_tp.grid.mesh import Mesh

_MOST_BYTES = 2**25
_Key = tuple[str, str, str]
"""The grid, the axis of it and the type, in words, by which ranks put their calls in one order."""


def computed_apart(device: torch.device) -> bool:
    """True if equal kernels on equal numbers may give two ranks other bits."""
    return device.type != "cpu"


def replicated_over(parameter: Tensor, mesh: Mesh) -> tuple[str, ...]:
    """Axes of x and y along which ranks hold the same parameter and compute its gradient each by itself, maybe to other bits."""
    if not computed_apart(mesh.device):
        return ()
    layout = layout_of(parameter)
    on, own = mesh.over(layout.grid), (*layout.axes, *layout.partial)
    return tuple(axis for axis in ("x", "y") if axis not in own and on.size(axis) > 1)


def _same_bits() -> bool:
    """True if torch is told to have kernels give the same bits for the same numbers."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def agree_on_bits(mesh: Mesh) -> None:
    """Go on only if all ranks will send, or none; every rank of the grid calls it once, before it trains.

    Raises:
        ValueError: torch is told to be deterministic on some ranks and not on others.
    """
    if not computed_apart(mesh.device) or mesh.size("grid") == 1:
        return
    own = int(_same_bits())
    extremes = torch.tensor([own, -own], device=mesh.device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.group("grid"))
    if sum(extremes.tolist()):
        raise ValueError(
            f"torch.use_deterministic_algorithms(True) is set on some ranks of the grid and not on all ({'set' if own else 'not set'} on rank "
            f"{dist.get_rank()}), and those without it would wait in each step for gradients that the others do not send; set it on all ranks or on none"
        )


@torch.no_grad()
def send_first(gradients: Iterable[tuple[Tensor, Tensor]], mesh: Mesh) -> None:
    """Give replicas the gradients of the first of them, in place; one call for each group and type, or for each 32 MiB of these.

    Args:
        gradients: parameters with what this rank has of their gradients, summed over other ranks; replicas give the same parts in the same order.
        mesh: the mesh.
    """
    if _same_bits():
        return
    found: dict[_Key, list[Tensor]] = defaultdict(list)
    groups: dict[_Key, dist.ProcessGroup] = {}
    for parameter, gradient in gradients:
        axes = replicated_over(parameter, mesh)
        if axes:
            on, axis = mesh.over(layout_of(parameter).grid), axes[0] if len(axes) == 1 else "model"
            key = str(on.grid), axis, str(gradient.dtype)
            found[key].append(gradient)
            groups[key] = on.group(axis)
    calls = [(groups[key], members) for key in sorted(found) for members in _full(found[key])]
    sent = []
    for group, members in calls:
        alone = len(members) == 1 and members[0].is_contiguous()
        flat = members[0] if alone else torch.cat([gradient.reshape(-1) for gradient in members])
        sent.append((dist.broadcast(flat, group=group, group_src=0, async_op=True), flat, members, group.rank() == 0))
    for work, flat, members, first in sent:
        assert work is not None
        work.wait()
        if first or flat is members[0]:
            continue
        for gradient, values in zip(members, flat.split([gradient.numel() for gradient in members]), strict=True):
            gradient.copy_(values.view_as(gradient))


def _full(gradients: list[Tensor]) -> Iterable[list[Tensor]]:
    """Groups of gradients that go in one call, one call after the other."""
    members: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if members and size + gradient.nbytes > _MOST_BYTES:
            yield members
            members, size = [], 0
        members.append(gradient)
        size += gradient.nbytes
    yield members
