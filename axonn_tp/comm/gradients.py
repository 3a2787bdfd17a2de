"""Gradient sums, the true global norm and clipping, as the parameters' layouts say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_tp.comm.collectives import all_reduce, start_all_reduce_
from axonn_tp.comm.kept_sums import forget, keep, scale_untouched
from axonn_tp.comm.replicated import send_first
from axonn_tp.comm.stalls import step_ends
from axonn_tp.grid.layout import layout_of
from axonn_tp.grid.mesh import Axes, Mesh

_BUCKET_BYTES = 2**25
Over = tuple[Axes, str]
"""An axis, and the axes that it is one of."""


@torch.no_grad()
def sync_gradients(
    parameters: Iterable[nn.Parameter], mesh: Mesh, average: bool = True, divisor: int | None = None
) -> None:
    """Sum gradients over the ranks that read other tokens; as their layouts say.

    Weights split over z are summed over data (equation 5.5), parameters of a scattered residual stream over x, z and
    data, all others over z and data. A parameter that no rank has a gradient of stays without; where some have one, others count as zero.
    On accelerators replicas over x and y then get the first one's (`axonn_tp.comm.replicated`). Called after each of several backward passes
    of a step it gives what it would give after the last.

    Args:
        parameters: trained parameters, the same in the same order on every rank.
        mesh: the mesh.
        average: divide by gz·gdata, so that the mean of the ranks' mean losses is what was differentiated.
        divisor: in the place of that.
    """
    parameters = list(parameters)
    divisor = divisor or (mesh.grid.batch if average else 1)
    sum_gradients_once(parameters, partial(summed_over, mesh=mesh), divisor)
    send_first(((parameter, parameter.grad) for parameter in parameters if parameter.grad is not None), mesh)


def _again(over: Over, divisor: int) -> float:
    """The number by which a sum is multiplied to come out of the next as it is."""
    axes, axis = over
    return divisor / axes.size(axis)


@torch.no_grad()
def keep_sums(parameters: Iterable[nn.Parameter], mesh: Mesh, divisor: int) -> None:
    """Have gradients that `sync_gradients` has summed come out as they are when it sums them again, with what backward adds until then.

    Args:
        parameters: those that it was given.
        mesh: the mesh.
        divisor: by which it divides.
    """
    for parameter in parameters:
        # One that was frozen has no sum, nor has what backward has brought since.
        if forget(parameter) and parameter.grad is not None:
            parameter.grad.mul_(_again(summed_over(parameter, mesh), divisor))


@torch.no_grad()
def sum_gradients_once(parameters: Sequence[nn.Parameter], over: Callable[[nn.Parameter], Over], divisor: int) -> None:
    """`sum_gradients`, of what is no sum of its own yet: one to which backward has added since counts once, too."""
    scale_untouched(parameters)
    sum_gradients(parameters, over, divisor)
    keep({parameter: _again(over(parameter), divisor) for parameter in parameters if parameter.requires_grad})


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], over: Callable[[nn.Parameter], Over], divisor: int) -> None:
    """Sum gradients over an axis each, in buckets, and divide them all by a number.

    Args:
        parameters: the same in the same order on every rank; those that are not trained are left out.
        over: which a parameter's gradient is summed over.
        divisor: what all are divided by.
    """
    step_ends()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    pending = []
    for (axes, axis), members in buckets(trained, _BUCKET_BYTES, over):
        if axes.size(axis) == 1:
            here = [parameter.grad for parameter in members if parameter.grad is not None]
            if divisor > 1 and here:
                torch._foreach_div_(here, divisor)
            continue
        present = [parameter.grad is not None for parameter in members]
        flat = members[0].new_empty(sum(p.numel() for p in members), dtype=gradient_dtype(members[0]))
        parts = flat.split([parameter.numel() for parameter in members])
        # The gradients live in the bucket from here on, so that nothing is copied back.
        for parameter, part in zip(members, parts, strict=True):
            if parameter.grad is not None:
                part.copy_(parameter.grad.to_dense().reshape(-1))
            parameter.grad = part.view_as(parameter)
        mark_absent(parts, present)
        pending.append((start_all_reduce_(flat, axes, axis), members, present))
    for under_way, members, present in pending:
        flat = under_way.wait()
        drop_absent(members, present)
        if divisor > 1:
            flat.div_(divisor)


def mark_absent(gradients: Sequence[Tensor], present: list[bool]) -> None:
    """Have the gradients that this rank lacks be -0.0, and the first element of others not.

    x + -0.0 is x, and a sum is -0.0 only where every term is: so the sum tells whether any rank had the gradient, and no
    byte is sent for it.
    """
    for gradient, here in zip(gradients, present, strict=True):
        if not here:
            _real(gradient).fill_(-0.0)
    if first := [gradient[:1] for gradient, here in zip(gradients, present, strict=True) if here]:
        torch._foreach_add_(first, 0.0)


def drop_absent(members: list[nn.Parameter], present: list[bool]) -> None:
    """Leave parameters that no rank has a gradient of without one, as in the serial model: an optimizer passes over them.

    Args:
        members: with the sums of gradients that `mark_absent` prepared.
        present: whether this rank had a gradient of each.
    """
    for parameter, here in zip(members, present, strict=True):
        total = parameter.grad if parameter.grad is None else _real(parameter.grad)
        if not here and total is not None and bool(((total == 0) & total.signbit()).all()):
            parameter.grad = None


def _real(gradient: Tensor) -> Tensor:
    """Complex numbers as pairs, which have signs."""
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def summed_over(parameter: nn.Parameter, mesh: Mesh) -> tuple[Mesh, str]:
    """The axis over which a parameter's gradient is summed, and the mesh that it is one of."""
    layout = layout_of(parameter)
    return mesh.over(layout.grid), layout.sum_axis


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The type of a parameter's gradient (`Options.gradient_dtype`)."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def buckets(
    parameters: Iterable[nn.Parameter], most_bytes: int, over: Callable[[nn.Parameter], Over]
) -> Iterator[tuple[Over, list[nn.Parameter]]]:
    """Parameters, in their order, by the group that sums their gradients; a bucket is full at `most_bytes`."""
    filling: dict[tuple[Over, torch.dtype], list[nn.Parameter]] = defaultdict(list)
    sizes: dict[tuple[Over, torch.dtype], int] = defaultdict(int)
    # Where some axes have size 1, two names may mean one group: one call is enough.
    known: dict[dist.ProcessGroup | None, Over] = {}
    for parameter in parameters:
        axes, axis = over(parameter)
        found = known.setdefault(axes.group(axis) if axes.size(axis) > 1 else None, (axes, axis))
        key = (found, gradient_dtype(parameter))
        filling[key].append(parameter)
        sizes[key] += parameter.numel() * key[1].itemsize
        if sizes[key] >= most_bytes:
            yield found, filling.pop(key)
            del sizes[key]
    for (found, _), members in filling.items():
        yield found, members


def sum_ranks(parameter: nn.Parameter, mesh: Mesh) -> tuple[dist.ProcessGroup | None, int]:
    """Who sums a parameter's gradients, and by what the sum is divided: what `sync_gradients` does, for other optimizers.

    Returns:
        The group, None where it is this rank alone, and gz·gdata.
    """
    axes, axis = summed_over(parameter, mesh)
    return (axes.group(axis) if axes.size(axis) > 1 else None), mesh.grid.batch


@torch.no_grad()
def global_square(squares: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter], mesh: Mesh) -> Tensor:
    """The whole model's sum of squares, from each rank's by parameter name; every rank calls it.

    Returns:
        A float64 scalar, the same on every rank.
    """
    layouts = {name: layout_of(parameter) for name, parameter in parameters.items()}
    whole = torch.zeros((), dtype=torch.float64, device=mesh.device)
    # Every rank sums on every grid, whatever it has squares of.
    for grid in dict.fromkeys([None, *(layout.grid for layout in layouts.values())]):
        total, on = torch.zeros_like(whole), mesh.over(grid)
        for name, square in squares.items():
            if layouts[name].grid == grid and layouts[name].counted_here(on.coordinates):
                total += square.double()
        whole += all_reduce(all_reduce(total, on, "model"), on, "z")
    return whole


@torch.no_grad()
def grad_norm(parameters: Iterable[nn.Parameter], mesh: Mesh) -> Tensor:
    """The 2-norm of the whole model's gradient, equal to the serial model's; call after `sync_gradients`.

    Returns:
        A float64 scalar, the same on every rank.
    """
    named = {str(number): parameter for number, parameter in enumerate(parameters)}
    squares = {name: p.grad.abs().double().square().sum() for name, p in named.items() if p.grad is not None}
    return global_square(squares, named, mesh).sqrt()


def clip_grad_norm_(parameters: Iterable[nn.Parameter], mesh: Mesh, max_norm: float) -> Tensor:
    """Scale gradients so that their global norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does.

    Returns:
        The norm before clipping.
    """
    parameters = list(parameters)
    norm = grad_norm(parameters, mesh)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
    return norm
