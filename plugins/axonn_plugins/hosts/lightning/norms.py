"""Norms of gradients that a script takes by Lightning's `grad_norm`, of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_plugins.hosts.lightning.gradients import mesh_of
from axonn_tp import Mesh, layout_of
from axonn_tp.comm.collectives import all_reduce


def grad_norms(
    original: Callable[..., dict[str, Any]], module: nn.Module, norm_type: float | int | str, group_separator: str = "/"
) -> dict[str, Any]:
    """Norms as Lightning's `grad_norm` gives them, of the serial model where the module is split; every rank calls it."""
    named = {name: p for name, p in module.named_parameters() if p.grad is not None}
    mesh, parameters = mesh_of(p.grad for p in named.values())
    kind = float(norm_type)
    if mesh is None or kind <= 0:
        return original(module, norm_type, group_separator)
    norms = _norms(parameters, mesh, kind)
    names = [f"grad_{kind}_norm{group_separator}{name}" for name in named]
    return dict(zip(names, norms, strict=True)) | {f"grad_{kind}_norm_total": norms.norm(kind)}


def _norms(parameters: Iterable[nn.Parameter], mesh: Mesh, kind: float) -> Tensor:
    """Each parameter's norm, of the serial one."""
    infinite = kind == float("inf")
    found = []
    for parameter in parameters:
        grad = torch.zeros(1) if parameter.grad is None or not parameter.grad.numel() else parameter.grad.detach()
        value = grad.double().abs().amax() if infinite else grad.double().abs().pow(kind).sum()
        found.append(value * layout_of(parameter).counted_here(mesh.coordinates))
    norms = torch.stack(found).to(mesh.device)
    if infinite:
        dist.all_reduce(norms, dist.ReduceOp.MAX, group=mesh.group("grid"))
        return norms.float()
    return all_reduce(all_reduce(norms, mesh, "model"), mesh, "z").pow(1 / kind).float()
