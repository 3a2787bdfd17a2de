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
from axonn_tp.grid.layout import layout_of
from axonn_tp.grid.mesh import Mesh

Norm = Callable[[list[Any], Any, float], Tensor]
"""The norm of parameters' gradients over the ranks that their owner knows, of a type."""
_owners: Any = WeakTensorKeyDictionary()
"""For each parameter of split models the mesh, or what knows the ranks in its place, and how it takes a norm."""


def measure_on_mesh(parameters: Iterable[Tensor], mesh: Mesh) -> None:
    """`measure_whole` of a split model's parameters, where any lies on several ranks."""
    parameters = list(parameters)
    if mesh.size("model") * mesh.size("z") > 1 or any(layout_of(parameter).grid for parameter in parameters):
        measure_whole(parameters, mesh, whole_norm)


def measure_whole(parameters: Iterable[Tensor], owner: Any, norm: Norm) -> None:
    """Have torch's `clip_grad_norm_` of these parameters take their norm over ranks; every rank calls it, behind gradients' sums.

    Args:
        parameters: of one model.
        owner: knows the ranks.
        norm: takes the norm.
    """
    for parameter in parameters:
        _owners[parameter] = owner, norm
    # Looked up by name, so that a script's import of clip_grad_norm_ may come before.
    original = clip_grad._get_total_norm
    if not getattr(original, "axonn_meshes", False):
        clip_grad._get_total_norm = _of_meshes(original)


def _of_meshes(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def get_total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """Torch's own, where gradients are of a split model over its ranks."""
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        owners = {id(p.grad): (p, owner) for p, owner in _owners.items() if p.grad is not None}
        split: dict[tuple[Any, Norm], list[Tensor]] = {}
        for tensor in tensors:
            if id(tensor) in owners:
                parameter, owner = owners[id(tensor)]
                split.setdefault(owner, []).append(parameter)
        if not split:
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        rest = [tensor for tensor in tensors if id(tensor) not in owners]
        parts = [norm(parameters, owner, float(norm_type)) for (owner, norm), parameters in split.items()]
        parts += [original(rest, norm_type, False, foreach).to(parts[0])] if rest else []
        total = torch.linalg.vector_norm(torch.stack(parts), float(norm_type)).to(tensors[0])
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"the gradients' norm of type {norm_type} is {total.item()}; to clip all the same, pass error_if_nonfinite=False"
            )
        return total

    get_total_norm.axonn_meshes = True  # type: ignore[attr-defined]
    return get_total_norm


def whole_norm(parameters: Iterable[Any], mesh: Mesh, norm_type: float) -> Tensor:
    """The norm of a split model's gradients over its mesh.

    Raises:
        ValueError: it is of another type than 2 and infinity.
    """
    require_known(norm_type)
    if norm_type == 2:
        return grad_norm(parameters, mesh)
    largest = largest_of(parameters, mesh.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.group("grid"))
    return largest


def require_known(norm_type: float) -> None:
    """Refuse other types of norms than those that are taken over ranks.

    Raises:
        ValueError: it is another.
    """
    if norm_type not in (2, float("inf")):
        raise ValueError(
            f"gradients of a split model are clipped by their norm of type 2 or inf, not {norm_type!r}; use one of these"
        )


def largest_of(parameters: Iterable[Any], device: torch.device) -> Tensor:
    """The largest magnitude among gradients of this rank."""
    largest = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.numel():
            largest = torch.maximum(largest, parameter.grad.detach().abs().amax().double())
    return largest
