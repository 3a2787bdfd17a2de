"""Which elements of a serial parameter each rank holds the state of: pure arithmetic on layouts and shares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from axonn_tp.grid.layout import Layout
from axonn_tp.grid.mesh import AXES, SEVERAL, Grid
from axonn_tp.grid.regions import Region, regions

Cut = tuple[slice, ...]
"""A rectangle of a serial parameter."""


@dataclass(frozen=True)
class Share:
    """The sharing of a parameter's state between the ranks that sum its gradient, as ZeRO-1 and 2 do.

    Attributes:
        start: where the parameter begins in its bucket.
        length: elements of the bucket whose state one rank holds.
    """

    start: int
    length: int


@dataclass(frozen=True)
class Spread:
    """Where the elements of one parameter are.

    Attributes:
        layout: how it lies on the grid.
        grid: the grid.
        share: how its state is shared out over the ranks that sum its gradient; None: each of them has all of it.
    """

    layout: Layout
    grid: Grid
    share: Share | None = None
    _regions: dict[int, list[Region]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the serial parameter."""
        return self.layout.serial_shape

    @property
    def elements(self) -> int:
        """Number of elements of the serial parameter."""
        return math.prod(self.shape)

    def span(self, rank: int) -> tuple[int, int]:
        """The first element of the flattened local tensor whose state a rank holds, and the one behind the last."""
        numel = self.layout.local_numel(self.grid)
        if self.share is None:
            return 0, numel
        low = self._turn(rank) * self.share.length - self.share.start
        return min(max(low, 0), numel), min(max(low + self.share.length, 0), numel)

    def _turn(self, rank: int) -> int:
        """A rank's place among those that sum the gradient."""
        at, place = self.grid.coordinates(rank), 0
        for axis in self._summed:
            place = place * self.grid.size(axis) + at[axis]
        return place

    @property
    def _summed(self) -> tuple[str, ...]:
        return SEVERAL.get(self.layout.sum_axis, (self.layout.sum_axis,))

    def regions(self, rank: int) -> list[Region]:
        """The rectangles of the serial parameter that make up a rank's span."""
        if rank not in self._regions:
            self._regions[rank] = regions(self.layout, self.grid, self.grid.coordinates(rank), *self.span(rank))
        return self._regions[rank]

    def family(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold anything of the parameter that this rank does: all, but for experts' other homes."""
        return _alike(self.grid, rank, frozenset(self.layout.home))

    def home(self, rank: int) -> tuple[int, int]:
        """Which of the homes a rank has the parameter of, and how many there are."""
        return self.layout.home_at(self.grid, self.grid.coordinates(rank)), self.layout.homes(self.grid)

    def sources(self, rank: int) -> tuple[int, ...]:
        """The ranks that together hold each element once, this one among them."""
        shared = frozenset(() if self.share is None else self._summed)
        own = (self.layout.axes | shared) - frozenset(self.layout.home)
        return _alike(self.grid, rank, frozenset(AXES) - own)


@cache
def _alike(grid: Grid, rank: int, axes: frozenset[str]) -> tuple[int, ...]:
    """The ranks at this rank's place on these axes, ascending."""
    at = grid.coordinates(rank)
    places: list[Mapping[str, int]] = [grid.coordinates(other) for other in range(grid.world)]
    return tuple(other for other, place in enumerate(places) if all(place[axis] == at[axis] for axis in axes))


def common(region: Region, cut: Cut) -> Region | None:
    """The part of a region that lies in a cut; None: nothing."""
    lows = [max(at, part.start) for at, part in zip(region.offsets, cut, strict=True)]
    highs = [min(at + size, part.stop) for at, size, part in zip(region.offsets, region.sizes, cut, strict=True)]
    if any(low >= high for low, high in zip(lows, highs, strict=True)):
        return None
    moved = sum((low - at) * by for low, at, by in zip(lows, region.offsets, region.strides, strict=True))
    sizes = tuple(high - low for low, high in zip(lows, highs, strict=True))
    return Region(region.start + moved, region.strides, tuple(lows), sizes)
