"""torch's `clip_grad_norm_` on parameters of a split model: its norm is that of the whole model, as of one process.

Of its own each rank would take the norm of its shards, and scale replicas by another number than the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.utils.weak import WeakTensorKeyDictionary

from axonn_tp.comm.gradients import grad_norm
from axonn_tp.grid.mesh import Mesh

_meshes: Any = WeakTensorKeyDictionary()
"""The mesh of each parameter of split models."""


def measure_whole(parameters: Iterable[Tensor], mesh: Mesh) -> None:
    """Have torch's `clip_grad_norm_` of these parameters take their norm over the mesh; every rank then calls it, behind `sync_gradients`.

    Args:
        parameters: of a split model.
        mesh: its mesh.
    """
    if mesh.size("model") * mesh.size("z") == 1:
        return
    for parameter in parameters:
        _meshes[parameter] = mesh
    # Looked up by name, so that a script's import of clip_grad_norm_ may come before.
    original = clip_grad._get_total_norm
    if not getattr(original, "axonn_meshes", False):
        clip_grad._get_total_norm = _of_meshes(original)


def _of_meshes(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def get_total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """Torch's own, where gradients are of a split model over its mesh."""
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        owners = {id(p.grad): (p, mesh) for p, mesh in _meshes.items() if p.grad is not None}
        split: dict[Mesh, list[Tensor]] = {}
        for tensor in tensors:
            if id(tensor) in owners:
                parameter, mesh = owners[id(tensor)]
                split.setdefault(mesh, []).append(parameter)
        if not split:
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        rest = [tensor for tensor in tensors if id(tensor) not in owners]
        parts = [whole_norm(parameters, mesh, float(norm_type)) for mesh, parameters in split.items()]
        parts += [original(rest, norm_type, False, foreach).to(parts[0])] if rest else []
        norm = torch.linalg.vector_norm(torch.stack(parts), float(norm_type)).to(tensors[0])
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"the gradients' norm of type {norm_type} is {norm.item()}; to clip all the same, pass error_if_nonfinite=False"
            )
        return norm

    get_total_norm.axonn_meshes = True  # type: ignore[attr-defined]
    return get_total_norm


def whole_norm(parameters: Iterable[Any], mesh: Mesh, norm_type: float) -> Tensor:
    """The norm of a split model's gradients over its mesh.

    Raises:
        ValueError: it is of another type than 2 and infinity.
    """
    if norm_type == 2:
        return grad_norm(parameters, mesh)
    if norm_type != float("inf"):
        raise ValueError(
            f"gradients of a split model are clipped by their norm of type 2 or inf, not {norm_type!r}; use one of these"
        )
    largest = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.numel():
            largest = torch.maximum(largest, parameter.grad.detach().abs().amax().double())
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.group("grid"))
    return largest
