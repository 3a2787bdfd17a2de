"""Tiles of stores, and their step."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from axonn_plugins.optim.lending import Part, TiledStep
from axonn_plugins.optim.memory import visiting_bytes
from axonn_plugins.optim.store import Segment, Store
from axonn_plugins.optim.tiles import Buffers, Cut, Memory, Slots, update, visit


@dataclass(eq=False)
class SegmentCut(Cut):
    """The cut of a segment, whose gradient the step consumes.

    Attributes:
        store: whose.
        segment: its weights are `part.weights`.
    """

    store: Store
    segment: Segment

    def weights(self, memory: Memory) -> Tensor:
        """See `Cut`."""
        part, entry, store = self.part, self.segment.entry, self.store
        if store.master is not None:
            return part.weights if part.whole else part.of(part.weights)
        room = None if entry.index is None else memory.get(store.dtype, store.device)[self.within]
        begin = self.segment.begin
        return entry.read(entry.flat, begin + part.begin, begin + part.end, room)

    def gradient(self, dtype: torch.dtype, factor: Tensor | None, memory: Memory) -> Tensor:
        """See `Cut`."""
        begin = self.segment.gradient + self.part.begin
        gradient = self.store.gradient[begin : begin + self.part.end - self.part.begin]
        if gradient.dtype != dtype:
            gradient = memory.get(dtype, gradient.device)[self.within].copy_(gradient)
        return gradient if factor is None else gradient.mul_(factor)

    def write(self, weights: Tensor, memory: Memory) -> None:
        """See `Cut`."""
        entry, store, begin = self.segment.entry, self.store, self.segment.begin + self.part.begin
        if entry.index is not None and store.master is not None:
            weights = memory.get(store.dtype, store.device)[self.within].copy_(weights)
        if entry.index is not None or store.master is not None:
            entry.write(weights, begin)

    def keep(self, key: str, value: Tensor) -> Tensor:
        """See `Cut`."""
        return self.store.state_of(key, self.segment, value.dtype) if self.store.host else super().keep(key, value)


@dataclass(eq=False)
class Tile:
    """The elements `begin` to `end` of those whose state this rank holds, updated together."""

    store: Store
    begin: int
    end: int
    cuts: list[SegmentCut]


def make_tiles(store: Store, size: int, without: Container[int] = ()) -> list[Tile]:
    """Cut a store's elements into tiles of at most `size`, those of some parameter groups left out."""
    tiles: list[Tile] = []
    for segment in store.segments:
        if segment.entry.group in without:
            continue
        done = 0
        while done < segment.length:
            place = segment.owned + done
            begin = place - place % size
            end = min(begin + size, store.owned)
            length = min(segment.length - done, end - place)
            if not tiles or tiles[-1].begin != begin:
                tiles.append(Tile(store, begin, end, []))
            part = Part(segment.entry.group, segment.weights, done, done + length)
            tiles[-1].cuts.append(SegmentCut(part, slice(place - begin, place - begin + length), store, segment))
            done += length
    return tiles


def step_tiles(
    optimizer: torch.optim.Optimizer, tiles: Sequence[Tile], buffers: Buffers, factor: Tensor | None
) -> None:
    """Update every tile's elements whose gradients have arrived, and write them to the parameters.

    Args:
        optimizer: over the segments' weights.
        tiles: of any stores.
        buffers: for the longest of those whose state is on the device.
        factor: by which gradients are multiplied; None: by nothing.
    """
    step, known = TiledStep(optimizer), {tile.store: dict(tile.store.states) for tile in tiles}
    needs: dict[torch.device, int] = {}
    for tile in tiles:
        if tile.store.host:
            visiting = visiting_bytes(tile.store, tile.end - tile.begin)
            needs[tile.store.device] = max(needs.get(tile.store.device, 0), visiting)
    slots = Slots(needs)
    for tile in tiles:
        store, cuts = tile.store, [cut for cut in tile.cuts if cut.segment.entry.arrived]
        if not cuts:
            continue
        if store.host:
            span = slice(tile.begin, tile.end)
            visit(step, cuts, slots.next(store.device), factor, span, store.master, known[store])
        else:
            update(step, cuts, buffers, factor)
    step.finish()
    slots.leave()
