"""Bytes that a rank sends in a training step on a grid, by axis, from the placements alone: no processes, nothing changes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import nn

from axonn_tp.comm.collectives import Collective
from axonn_tp.grid.layout import Layout
from axonn_tp.grid.mesh import Grid
from axonn_tp.plan.rules import Placement

_ACROSS = {"data": ("data",), "batch": ("z", "data"), "tokens": ("x", "z", "data")}


@dataclass(frozen=True)
class Volume:
    """Bytes and calls over one axis.

    Attributes:
        sent: bytes that a rank sends under the ring algorithms (000, equations 5.1 to 5.5).
        messages: that a rank sends one after another.
        scattered: bytes among `sent` that go in reduce-scatters, which some libraries do at an all-reduce's cost.
        calls: collectives.
    """

    sent: Fraction = Fraction(0)
    messages: int = 0
    scattered: Fraction = Fraction(0)
    calls: int = 0

    def __add__(self, other: Volume) -> Volume:
        return Volume(
            self.sent + other.sent,
            self.messages + other.messages,
            self.scattered + other.scattered,
            self.calls + other.calls,
        )


def step_volumes(
    model: nn.Module, placements: Sequence[Placement], grid: Grid, tokens: int, microbatches: int = 1
) -> dict[str, Volume]:
    """Volumes of a step by axis: x, y, z, data, and ``"batch"`` and ``"tokens"`` for sums over several.

    Args:
        model: the serial model, on any device including meta.
        placements: of its modules on this grid, from `place`.
        grid: the grid.
        tokens: rows of a micro-batch on the ranks of one x-y plane.
        microbatches: of a step; gradients are summed over ranks once.
    """
    found: dict[str, Volume] = defaultdict(Volume)
    alike = Counter(map(_Alike, placements))
    for one, count in alike.items():
        placement, times = one.placement, count * microbatches
        dtype = next(placement.module.parameters(), torch.empty(0)).dtype
        for collective in placement.collectives(tokens, grid):
            size = placement.options.itemsize(collective, dtype)
            sent = times * collective.sent * size
            scattered = sent if collective.op == "reduce_scatter" else Fraction(0)
            found[collective.axis] += Volume(
                sent, times * _messages(collective), scattered, times * (collective.size > 1)
            )
    for axis, (elements, size) in _gradients(model, placements, grid).items():
        members = [name for name in _ACROSS[axis] if grid.size(name) > 1]
        if members:
            ranks = 1
            for name in members:
                ranks *= grid.size(name)
            total = Collective("all_reduce", axis, ranks, elements)
            # As `Mesh.axis_names` calls the group.
            named = members[0] if len(members) == 1 else "batch" if members == ["z", "data"] else axis
            found[named] += Volume(total.sent * size, _messages(total), calls=1)
    return dict(found)


def local_parameters(model: nn.Module, placements: Sequence[Placement], grid: Grid) -> int:
    """Elements of parameters that one rank holds."""
    return sum(count * layout.local_numel(grid) for (layout, _), count in _layouts(model, placements).items())


class _Alike:
    """A placement that equals all with the same layouts and collectives, as the layers of repeated blocks have."""

    def __init__(self, placement: Placement) -> None:
        module, self.placement = placement.module, placement
        shapes = tuple((name, p.shape, p.dtype) for name, p in module._parameters.items() if p is not None)
        self._key = (
            *(type(module), module.extra_repr(), getattr(module, "label_smoothing", 0.0), shapes),
            *(placement.kind, placement.split, placement.scatter_tokens, placement.scatter),
            *(placement.classes, placement.tied, bool(placement.readers) and placement.readers[0] != placement.name),
        )

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Alike) and self._key == other._key


def _layouts(model: nn.Module, placements: Sequence[Placement]) -> Counter[tuple[Layout, torch.dtype | None]]:
    """Number of parameters of each layout and type; the type is None where nothing is trained."""
    known: dict[_Alike, dict[str, Layout]] = {}
    split: dict[int, Layout] = {}
    for placement in placements:
        if (key := _Alike(placement)) not in known:
            known[key] = placement.layouts()
        split |= {id(placement.module._parameters[name]): layout for name, layout in known[key].items()}
    return Counter(
        (
            split.get(id(parameter)) or Layout(tuple(parameter.shape)),
            parameter.dtype if parameter.requires_grad else None,
        )
        for parameter in model.parameters()
    )


def _gradients(model: nn.Module, placements: Sequence[Placement], grid: Grid) -> dict[str, tuple[int, int]]:
    """Elements, and bytes of one, of the gradients that are summed, by group."""
    found: dict[str, tuple[int, int]] = {}
    for (layout, dtype), count in _layouts(model, placements).items():
        if dtype is not None:
            summed = placements[0].options.summed_in(dtype) if placements else dtype
            elements, _ = found.get(layout.sum_axis, (0, 0))
            found[layout.sum_axis] = (elements + count * layout.local_numel(grid), summed.itemsize)
    return found


def _messages(collective: Collective) -> int:
    """Messages of a ring: one for each further rank, twice in a sum."""
    return (collective.size - 1) * (2 if collective.op == "all_reduce" else 1)
