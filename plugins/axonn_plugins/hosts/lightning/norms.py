"""Norms of gradients that a script takes itself, of the whole model: torch's `clip_grad_norm_` and Lightning's `grad_norm`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from axonn_plugins.hosts.lightning.gradients import mesh_of, whole_norm
from axonn_tp import Mesh, layout_of
from axonn_tp.comm.collectives import all_reduce


def measure_whole() -> None:
    """Have torch's `clip_grad_norm_` take the norm over the mesh where the gradients are of a split model; harmless when called again."""
    original = (
        clip_grad._get_total_norm
    )  # looked up by name, so that a script's import of clip_grad_norm_ may come before
    if not getattr(original, "axonn", False):
        clip_grad._get_total_norm = _of_mesh(original)


def _of_mesh(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def get_total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """Torch's own, over the mesh where the gradients are of a split model."""
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        mesh, parameters = mesh_of(tensors)
        if mesh is None:
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        norm = whole_norm(parameters, mesh, float(norm_type)).to(tensors[0].dtype)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the gradients' norm of type {norm_type} is {norm.item()}")
        return norm

    get_total_norm.axonn = True  # type: ignore[attr-defined]
    return get_total_norm


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
