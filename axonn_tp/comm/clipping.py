"""Norms that a script takes by torch's `clip_grad_norm_` and `get_total_norm` of a split model: those of the whole one.

Of its own each rank would take the norm of its shards, and scale replicas by another number than the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.utils.weak import WeakTensorKeyDictionary

from axonn_tp.comm.collectives import all_reduce
from axonn_tp.comm.gradients import global_square
from axonn_tp.grid.layout import layout_of
from axonn_tp.grid.mesh import Mesh

Norm = Callable[[list[Tensor], list[Any], Any, float], Tensor]
"""The norm of tensors, such as gradients, with the parameters that they lie as, over the ranks that their owner knows, of a type."""
_owners: Any = WeakTensorKeyDictionary()
"""For each parameter of split models the mesh, or what knows the ranks in its place, and how it takes a norm."""
_taken: list[bool] = []


def measure_on_mesh(parameters: Iterable[Tensor], mesh: Mesh) -> None:
    """`measure_whole` of a split model's parameters, where any lies on several ranks."""
    parameters = list(parameters)
    if mesh.size("model") * mesh.size("z") > 1 or any(layout_of(parameter).grid for parameter in parameters):
        measure_whole(parameters, mesh, whole_norm)


def measure_whole(parameters: Iterable[Tensor], owner: Any, norm: Norm) -> None:
    """Have torch's norms of these parameters, or of their gradients, go over ranks; every rank then calls it, behind the sum of gradients.

    Args:
        parameters: of one model.
        owner: knows the ranks.
        norm: takes the norm.
    """
    for parameter in parameters:
        _owners[parameter] = owner, norm
    if not _taken:
        _taken.append(True)
        _take_over()


def measure_alike(parameter: Tensor, copy: Tensor) -> None:
    """The same of a parameter's copy, or of one that takes its place, where it is so of the parameter."""
    if parameter in _owners:
        _owners[copy] = _owners[parameter]


def _take_over() -> None:
    original: Any = clip_grad._get_total_norm
    free = original.__code__.co_freevars
    if "func" in free:
        # What torch's function calls, so that a script's import of it may come before.
        cell = original.__closure__[free.index("func")]
        cell.cell_contents = _of_owners(cell.cell_contents)
    else:
        clip_grad._get_total_norm = torch.nn.utils.get_total_norm = _of_owners(original)


def _of_owners(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def get_total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """Torch's own, over ranks where tensors are a split model's parameters or their gradients."""
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        lies_as = {id(parameter): parameter for parameter in _owners}
        lies_as |= {id(p.grad): p for p in _owners if p.grad is not None}
        split: dict[tuple[Any, Norm], list[tuple[Tensor, Tensor]]] = {}
        for tensor in tensors:
            if (parameter := lies_as.get(id(tensor))) is not None:
                split.setdefault(_owners[parameter], []).append((tensor, parameter))
        if not split:
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        kind = float(norm_type)
        if not kind > 0:
            raise ValueError(
                f"norm_type = {kind:g} is not taken of a split model; use 2, another positive number or inf"
            )
        parts = [norm([t for t, _ in of], [p for _, p in of], owner, kind) for (owner, norm), of in split.items()]
        rest = [tensor for tensor in tensors if id(tensor) not in lies_as]
        parts += [original(rest, kind, False, foreach).to(parts[0])] if rest else []
        first = tensors[0]
        total = torch.linalg.vector_norm(torch.stack(parts), kind).to(first.device, first.abs().dtype)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"the norm of type {kind:g} of a split model is {total.item()}; to clip all the same, pass error_if_nonfinite=False"
            )
        return total

    return get_total_norm


@torch.no_grad()
def whole_norm(tensors: list[Tensor], parameters: list[Any], mesh: Mesh, kind: float) -> Tensor:
    """The serial model's norm, of a positive type; a float64 scalar, the same on every rank of the mesh, all of which call it.

    Args:
        tensors: this rank's parts.
        parameters: whose layouts they have.
        mesh: on which these lie.
        kind: of the norm.
    """
    if kind == float("inf"):
        largest = largest_of(tensors, mesh.device)
        return all_reduce(all_reduce(largest, mesh, "model", "max"), mesh, "batch", "max")
    powers = {str(number): power(tensor, kind) for number, tensor in enumerate(tensors)}
    named = {str(number): parameter for number, parameter in enumerate(parameters)}
    return global_square(powers, named, mesh).pow(1 / kind)


def power(tensor: Tensor, kind: float) -> Tensor:
    """The sum of magnitudes to the power of a norm's type, in float64."""
    return tensor.detach().abs().double().pow(kind).sum()


def largest_of(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """The largest magnitude on this rank."""
    largest = [tensor.detach().abs().amax().double().to(device) for tensor in tensors if tensor.numel()]
    return torch.stack([torch.zeros((), dtype=torch.float64, device=device), *largest]).amax()
