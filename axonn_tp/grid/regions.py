"""A rank's part of a serial tensor, as rectangles: a checkpoint needs them to be read on another grid.

A z-shard is a flat range of a block, and ZeRO cuts it further, so that placements of whole dims cannot express it; but
a flat range of a row-major block is a few rectangles: part of a row, whole rows, part of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from axonn_tp.grid.layout import Layout
from axonn_tp.grid.mesh import AXES, Grid

Segment = tuple[int, int, int]


@dataclass(frozen=True)
class Region:
    """A rectangle of the serial tensor, and where its elements are in a flat local tensor.

    Attributes:
        start: place of its first element in the flat local tensor.
        strides: of its dims in the flat local tensor.
        offsets: of its first element in the serial tensor, by dim.
        sizes: by dim.
    """

    start: int
    strides: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def cut(self) -> tuple[slice, ...]:
        """The slices of the serial tensor that give it."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))

    def view(self, flat: Tensor) -> Tensor:
        """The rectangle's elements in a contiguous flat tensor."""
        return flat.as_strided(self.sizes, self.strides, flat.storage_offset() + self.start)

    def pieces(self, limit: int) -> Iterator[Region]:
        """The same elements in rectangles of at most `limit` elements."""
        if math.prod(self.sizes) <= limit:
            yield self
            return
        dim = next(dim for dim, size in enumerate(self.sizes) if size > 1)
        step = max(1, limit // math.prod(self.sizes[dim + 1 :]))
        for at in range(0, self.sizes[dim], step):
            piece = Region(
                self.start + at * self.strides[dim],
                self.strides,
                (*self.offsets[:dim], self.offsets[dim] + at, *self.offsets[dim + 1 :]),
                (*self.sizes[:dim], min(step, self.sizes[dim] - at), *self.sizes[dim + 1 :]),
            )
            yield from piece.pieces(limit)


def regions(
    layout: Layout, grid: Grid, coordinates: Mapping[str, int], start: int = 0, stop: int | None = None
) -> list[Region]:
    """The rectangles of the serial tensor that a rank holds, without padding.

    Args:
        layout: how the parameter lies on the grid.
        grid: the grid.
        coordinates: the rank's place on every axis.
        start: first element of the rank's flattened local tensor that counts, as of a ZeRO partition.
        stop: the element after the last; all when None.

    Returns:
        Disjoint rectangles; their `Region.start` counts from `start`.
    """
    numel = layout.local_numel(grid)
    stop = numel if stop is None else min(stop, numel)
    block = layout.block_shape(grid)
    shift = numel * coordinates["z"] if layout.over_z else 0
    begin, end = shift + start, min(shift + stop, math.prod(block))
    strides = tuple(math.prod(block[dim + 1 :]) for dim in range(len(block)))
    position = tuple(coordinates[axis] for axis in AXES)
    segments = [_segments(layout, grid, position, dim) for dim in range(len(block))]
    found = []
    for low, sizes in _boxes(block, begin, end):
        cuts = [
            [_overlap(segment, at, size) for segment in segments[dim]]
            for dim, (at, size) in enumerate(zip(low, sizes, strict=True))
        ]
        for cut in product(*cuts):
            if all(length > 0 for _, _, length in cut):
                local = sum(at * stride for (at, _, _), stride in zip(cut, strides, strict=True))
                offsets, lengths = tuple(at for _, at, _ in cut), tuple(length for _, _, length in cut)
                turn = slice(None, None, -1 if layout.transposed else 1)
                found.append(Region(local - begin, strides[turn], offsets[turn], lengths[turn]))
    return found


@lru_cache(maxsize=4096)
def _segments(layout: Layout, grid: Grid, position: tuple[int, ...], dim: int) -> list[Segment]:
    """Runs (start in the block, start in the serial tensor, length) of one dim, found by splitting its indices."""
    split = tuple((0, axis) for other, axis in layout.split if other == dim)
    even = tuple((0, axis) for other, axis in layout.even if other == dim)
    parts = layout.parts if dim == layout.parts_dim else 1
    shape = (layout.shape[dim],)
    alone = replace(layout, shape=shape, split=split, even=even, parts=parts, parts_dim=0, over_z=False)
    # Counted from 1, so that 0 is padding.
    indices = alone.block(torch.arange(1, layout.shape[dim] + 1), grid, dict(zip(AXES, position, strict=True)))
    places = indices.nonzero().flatten()
    if not len(places):
        return []
    values = indices[places]
    breaks = ((values.diff() != 1) | (places.diff() != 1)).nonzero().flatten() + 1
    ends = [0, *breaks.tolist(), len(places)]
    return [(int(places[a]), int(values[a]) - 1, b - a) for a, b in zip(ends, ends[1:], strict=False)]


def _overlap(segment: Segment, at: int, size: int) -> Segment:
    """The part of a segment in [at, at + size) of the block; of length 0 or less where there is none."""
    local, serial, length = segment
    low = max(local, at)
    return low, serial + low - local, min(local + length, at + size) - low


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The flat range [start, stop) of a row-major tensor as rectangles (offsets, sizes), in order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if head:
        end = tail if first == last else row
        for offsets, sizes in _boxes(shape[1:], head, end):
            yield (first, *offsets), (1, *sizes)
        if first == last:
            return
        first += 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    for offsets, sizes in _boxes(shape[1:], 0, tail):
        yield (last, *offsets), (1, *sizes)
