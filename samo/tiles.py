"""The optimizer's step, a tile at a time: upcast, update, downcast, write back (000, section 4.1.3).

The dissertation upcasts the whole compressed gradient and keeps a second copy of the 16-bit weights while it expands them:
6 bytes a kept element. Tiles need these for one tile only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samo.store import Segment, Store


@dataclass(eq=False)
class Piece:
    """A segment within one tile.

    Attributes:
        segment: what it is part of the state of.
        at: where it begins in the tile.
        weights: what the inner optimizer updates: float32, its view of the master weights, or of the tile's buffer.
    """

    segment: Segment
    at: int
    weights: Tensor

    @property
    def within(self) -> slice:
        """Its elements in the tile."""
        return slice(self.at, self.at + self.segment.length)


@dataclass(eq=False)
class Tile:
    """Consecutive elements whose state this rank holds, updated together.

    Attributes:
        store: whose.
        begin: where they begin in the vector of the elements whose state this rank holds.
        length: how many.
        pieces: by entry.
        plan: what `samo.fused` keeps of it from step to step.
    """

    store: Store
    begin: int
    length: int
    pieces: list[Piece]
    plan: object = None


class Buffers:
    """Memory for one tile, reused by all tiles of one kind.

    Args:
        size: elements of the longest tile.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._made: dict[tuple[torch.dtype, torch.device, int], Tensor] = {}

    def get(self, dtype: torch.dtype, device: torch.device, number: int = 0) -> Tensor:
        """The buffer `number` of this kind."""
        key = (dtype, device, number)
        if key not in self._made:
            self._made[key] = torch.empty(self.size, dtype=dtype, device=device)
        return self._made[key]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._made.values())


def make_tiles(store: Store, size: int) -> list[Tile]:
    """Cut a store's elements into tiles of at most `size`."""
    tiles: list[Tile] = []
    for segment in store.segments():
        done = 0
        while done < segment.length:
            master = segment.master + done
            begin = master - master % size
            length = min(segment.length - done, begin + size - master)
            if not tiles or tiles[-1].begin != begin:
                tiles.append(Tile(store, begin, min(size, store.owned - begin), []))
            cut = replace(
                segment, begin=segment.begin + done, gradient=segment.gradient + done, master=master, length=length
            )
            if store.master is None:
                weights = store.gradient.new_empty(0)  # its shape comes with its first step
            else:
                weights = store.master[master : master + length]
            tiles[-1].pieces.append(Piece(cut, master - begin, weights))
            done += length
    return tiles


def load_tile(tile: Tile, pieces: Iterable[Piece], buffers: Buffers, factor: Tensor | None) -> None:
    """Give each piece its float32 weights and gradient, the latter times `factor`."""
    store = tile.store
    device = store.gradient.device
    upcast = None if store.master is None else buffers.get(torch.float32, device)
    for piece in pieces:
        segment = piece.segment
        gradient = store.gradient[segment.gradient : segment.gradient + segment.length]
        if upcast is not None:
            gradient = upcast[piece.within].copy_(gradient)
        else:
            entry = segment.entry
            room = None if entry.index is None else buffers.get(store.gradient.dtype, device)[piece.within]
            piece.weights.data = entry.read(entry.flat, segment.begin, segment.begin + segment.length, room)
        piece.weights.grad = gradient if factor is None else gradient.mul_(factor)


def store_tile(tile: Tile, pieces: Iterable[Piece], buffers: Buffers) -> None:
    """Write the updated weights of the pieces to where they belong in the parameters, and let the gradients go."""
    store = tile.store
    downcast = None
    if store.master is not None:
        downcast = buffers.get(store.gradient.dtype, store.gradient.device)[: tile.length]
        downcast.copy_(store.master[tile.begin : tile.begin + tile.length])
    for piece in pieces:
        entry = piece.segment.entry
        piece.weights.grad = None
        if downcast is not None:
            entry.write(downcast[piece.within], piece.segment.begin)
        elif entry.index is not None:
            entry.write(piece.weights, piece.segment.begin)
