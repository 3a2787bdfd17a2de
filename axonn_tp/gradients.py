"""Gradient sums, the true global norm and clipping, as the parameters' layouts say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_tp.collectives import all_reduce
from axonn_tp.layout import layout_of
from axonn_tp.mesh import Mesh


@torch.no_grad()
def sync_gradients(parameters: Iterable[nn.Parameter], mesh: Mesh, average: bool = True) -> None:
    """Sum gradients over the ranks that read other tokens; as their layouts say.

    Weights split over z are summed over data (equation 5.5), parameters of a scattered residual stream over x, z and
    data, all others over z and data.

    Args:
        parameters: trained parameters, the same in the same order on every rank.
        mesh: the mesh.
        average: divide by gz·gdata, so that the mean of the ranks' mean losses is what was differentiated.
    """
    buckets: dict[tuple[str, torch.dtype], list[Tensor]] = defaultdict(list)
    # Where some axes have size 1, two names may mean one group: one call is enough.
    axes: dict[dist.ProcessGroup, str] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            axis = axes.setdefault(mesh.group(layout_of(parameter).sum_axis), layout_of(parameter).sum_axis)
            buckets[axis, parameter.grad.dtype].append(parameter.grad)
    for (axis, _), gradients in buckets.items():
        if mesh.size(axis) > 1:
            summed = all_reduce(torch.cat([gradient.reshape(-1) for gradient in gradients]), mesh, axis)
            for gradient, part in zip(gradients, summed.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
        if average and mesh.grid.batch > 1:
            torch._foreach_div_(gradients, mesh.grid.batch)


@torch.no_grad()
def grad_norm(parameters: Iterable[nn.Parameter], mesh: Mesh) -> Tensor:
    """The 2-norm of the whole model's gradient, equal to the serial model's; call after `sync_gradients`.

    Returns:
        A float64 scalar, the same on every rank.
    """
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for parameter in parameters:
        if parameter.grad is not None and layout_of(parameter).counted_here(mesh.coordinates):
            total += parameter.grad.double().square().sum()
    return all_reduce(all_reduce(total, mesh, "model"), mesh, "z").sqrt()


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
