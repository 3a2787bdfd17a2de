"""Norms that a script takes by torch's `clip_grad_norm_` and `get_total_norm` of a split model: those of the whole one.

Of its own each rank would take the norm of its shards, and scale replicas by another number than the others. Torch's functions are replaced here alone;
whoever keeps gradients elsewhere than in ``grad`` is asked before these are clipped (`clip_by`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
Clipper = Callable[[list[Tensor], float, "Tensor | None", float], bool]
"""Clips gradients of parameters, where it has them, at a number: their norm as torch has found it, of a type; or, without one, each element. True: done."""
_clippers: list[Clipper] = []
_kind = 2.0
"""The type of the norm that is under way."""
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
    _take_over()


def clip_by(clipper: Clipper) -> None:
    """Have this asked before torch clips gradients; harmless when called again."""
    if clipper not in _clippers:
        _clippers.append(clipper)
    _take_over()


def measure_alike(parameter: Tensor, copy: Tensor) -> None:
    """The same of a parameter's copy, or of one that takes its place, where it is so of the parameter."""
    if parameter in _owners:
        _owners[copy] = _owners[parameter]


def owner_of(parameter: Tensor) -> Any:
    """The mesh that a split model's parameter lies on, or what knows its ranks in its place; None where it is of no such model."""
    return _owners.get(parameter, (None,))[0]


def norm_of_all(norms: Mapping[Any, Tensor], parameters: Iterable[Any]) -> Tensor | None:
    """The 2-norm of all gradients, over ranks where parameters are a split model's; None where none is.

    Args:
        norms: of each parameter's gradient here, of those that have one.
        parameters: all of them; every rank has the same.
    """
    split: dict[tuple[Any, Norm], list[Any]] = {}
    parameters = list(parameters)
    for parameter in parameters:
        if parameter in _owners:
            split.setdefault(_owners[parameter], []).append(parameter)
    if not split:
        return None
    parts = [
        norm([norms.get(one, one.new_zeros(())) for one in some], some, owner, 2.0)
        for (owner, norm), some in split.items()
    ]
    parts += [norms[one].to(parts[0]) for one in parameters if one in norms and one not in _owners]
    return torch.linalg.vector_norm(torch.stack(parts))


def _take_over() -> None:
    if _taken:
        return
    _taken.append(True)
    replaced: dict[str, Callable[[Any], Any]] = {
        "_get_total_norm": _of_owners,
        "_clip_grads_with_norm_": _asking,
        "clip_grad_value_": _asking_of_values,
    }
    for name, replace in replaced.items():
        original: Any = getattr(clip_grad, name)
        free = original.__code__.co_freevars
        if "func" in free:
            # What torch's function calls, so that a script's import of it may come before.
            cell = original.__closure__[free.index("func")]
            cell.cell_contents = replace(cell.cell_contents)
        else:
            for home, named in ((clip_grad, name), (torch.nn.utils, name.lstrip("_"))):
                setattr(home, named, replace(original))


def _done(parameters: list[Tensor], most: float, norm: Tensor | None) -> bool:
    return any(clipper(parameters, most, norm, _kind) for clipper in _clippers)


def _asking(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def clip_grads_with_norm_(
        parameters: Any, max_norm: float, total_norm: Tensor, foreach: bool | None = None
    ) -> None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not _done(given, float(max_norm), total_norm):
            original(given, max_norm, total_norm, foreach)

    return clip_grads_with_norm_


def _asking_of_values(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def clip_grad_value_(parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not _done(given, float(clip_value), None):
            original(given, clip_value, foreach)

    return clip_grad_value_


def _of_owners(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def get_total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """Torch's own, over ranks where tensors are a split model's parameters or their gradients."""
        global _kind
        _kind = float(norm_type)
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
        largest = sent_largest(tensors, mesh.device)
        return received_largest(all_reduce(all_reduce(largest, mesh, "model", "max"), mesh, "batch", "max"))
    powers = {str(number): power(tensor, kind) for number, tensor in enumerate(tensors)}
    named = {str(number): parameter for number, parameter in enumerate(parameters)}
    return global_square(powers, named, mesh).pow(1 / kind)


def power(tensor: Tensor, kind: float) -> Tensor:
    """The sum of magnitudes to the power of a norm's type, in float64."""
    return tensor.detach().abs().double().pow(kind).sum()


def sent_largest(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """The largest magnitude on this rank for a maximum over ranks, in which backends may drop NaN: if there is one, and the largest of what is none."""
    largest = [tensor.detach().abs().amax().double().to(device) for tensor in tensors if tensor.numel()]
    found = torch.stack([torch.zeros((), dtype=torch.float64, device=device), *largest])
    return torch.stack([found.isnan().any().double(), found.nan_to_num(0.0, torch.inf).amax()])


def received_largest(sent: Tensor) -> Tensor:
    """The largest magnitude on all ranks, of the maximum of what `sent_largest` gave: NaN where one of them has one."""
    return torch.where(sent[0] > 0, torch.nan, sent[1])
