"""Optimizers that step by gradients which nobody has summed over the ranks that read other samples, as where `sync_gradients` was forgotten.

Or by options that are not the same on all ranks. Gradients that were summed, by whomever, have one norm on all ranks that sum them. Norms are told by
way of the store, in fewer and fewer steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from axonn_tp.comm.clipping import owner_of
from axonn_tp.comm.gradients import summed_over
from axonn_tp.comm.same_options import SameOptions
from axonn_tp.comm.telling import Telling
from axonn_tp.grid.mesh import Mesh

_APART = 1e-3
"""Relative distance between norms of gradients that are other ones: sums that were made in two orders are nearer, in 16 bits too."""
_SMALL = 1e-3
"""Part of the largest norm below which nothing but rounding may be in a gradient."""


class _Steps:
    def __init__(self) -> None:
        self.count = 0
        self.tellings: dict[dist.ProcessGroup, Telling] = {}
        self.options = SameOptions()


_seen: WeakKeyDictionary[Optimizer, _Steps] = WeakKeyDictionary()


@torch.no_grad()
def look_at_sums(optimizer: Optimizer, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """An optimizer is about to step.

    Args:
        optimizer: it, whose gradients are to be sums.
        given: arguments of the step, itself first.
        named: of those with names.

    Raises:
        ValueError: in an earlier step its gradients were no sums, or its options were others on another rank; the same on all ranks, some
            steps later.
    """
    if hasattr(optimizer, "axonn_in_parts"):
        return  # one of ours holds it
    steps = _seen.setdefault(optimizer, _Steps())
    steps.options.look(type(optimizer).__name__, lambda: _grids_of(optimizer), dict(enumerate(optimizer.param_groups)))
    if named.get("closure", given[1] if len(given) > 1 else None) is not None:
        return  # gradients are yet to come
    for telling in steps.tellings.values():
        found = telling.heard()
        if found is not None:
            _compare(optimizer, [_read(one) for one in found], telling.ranks)
    steps.count += 1
    if steps.count & (steps.count - 1):
        return
    for group, parameters in _by_group(optimizer).items():
        telling = steps.tellings.setdefault(group, Telling(group, f"norms of {len(parameters)} gradients"))
        telling.tell(_written([_norm(parameter) for parameter in parameters]))


def _grids_of(optimizer: Optimizer) -> set[dist.ProcessGroup]:
    owners = {owner_of(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {mesh.group("grid") for mesh in owners if isinstance(mesh, Mesh)}


def _by_group(optimizer: Optimizer) -> dict[dist.ProcessGroup, list[Tensor]]:
    """Parameters of split models by the ranks that sum their gradients, where these are several."""
    found: dict[dist.ProcessGroup, list[Tensor]] = {}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        mesh = owner_of(parameter)
        expert = not getattr(parameter, "allreduce", True)
        if isinstance(mesh, Mesh) and parameter.requires_grad and mesh.grid.batch > 1 and not expert:
            axes, axis = summed_over(parameter, mesh)
            if axes.size(axis) > 1:
                found.setdefault(axes.group(axis), []).append(parameter)
    if any(p.is_cuda for parameters in found.values() for p in parameters) and torch.cuda.is_current_stream_capturing():
        return {}  # nothing may be asked of the device
    return found


def _norm(parameter: Tensor) -> Tensor:
    grad = parameter.grad
    if grad is None:
        return torch.zeros((), dtype=torch.float64, device=parameter.device)
    return torch.linalg.vector_norm(grad.to_dense().abs(), dtype=torch.float64)


def _written(norms: list[Tensor]) -> str:
    return " ".join(float.hex(norm) for norm in torch.stack(norms).tolist())


def _read(said: str) -> list[float]:
    return [float.fromhex(one) for one in said.split()]


def _compare(optimizer: Optimizer, norms: list[list[float]], ranks: list[int]) -> None:
    if len({len(one) for one in norms}) > 1:
        return
    table = torch.tensor(norms, dtype=torch.float64)
    most, least = table.amax(0), table.amin(0)
    if not table.isfinite().all() or not ((most - least > _APART * most) & (most > _SMALL * most.max())).any():
        return
    raise ValueError(
        f"{type(optimizer).__name__} has stepped by gradients that differ on ranks {', '.join(map(str, ranks))}, which read other samples: nobody has summed "
        "them; call axonn_tp.sync_gradients(model.parameters(), mesh), or GradientReducer.finish(), between backward and step(), and go on from weights "
        "before it"
    )
