"""The optimizer's step on stores, a tile at a time: upcast, update, downcast, write back (000, sections 4.1.3 and 3.3.2).

The dissertation upcasts the whole compressed gradient and keeps a second copy of the 16-bit weights while it expands them:
6 bytes a kept element. Tiles need these for one tile only. Where state is in host memory it is copied to the device and back
a tile at a time, one tile while another is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from axonn_plugins.optim.lending import Loan, Part, TiledStep
from axonn_plugins.optim.store import Segment, Store

_SLOTS = 2  # one tile is on its way in or out while the other is updated


@dataclass(eq=False)
class Cut:
    """A segment within one tile.

    Attributes:
        segment: what it is part of the state of.
        part: its elements of `segment.weights`.
        within: its elements in the tile.
    """

    segment: Segment
    part: Part
    within: slice

    def gradient(self, store: Store) -> Tensor:
        """Its gradient, a view."""
        begin = self.segment.gradient + self.part.begin
        return store.gradient[begin : begin + self.part.end - self.part.begin]

    def read(self, out: Tensor | None) -> Tensor:
        """Its weights from the parameter: a view, or in `out` where there is an index."""
        entry, begin = self.segment.entry, self.segment.begin
        return entry.read(entry.flat, begin + self.part.begin, begin + self.part.end, out)

    def write(self, weights: Tensor) -> None:
        """Put its weights into the parameter."""
        self.segment.entry.write(weights, self.segment.begin + self.part.begin)


@dataclass(eq=False)
class Tile:
    """The elements `begin` to `end` of those whose state this rank holds, updated together."""

    store: Store
    begin: int
    end: int
    cuts: list[Cut]


def make_tiles(store: Store, size: int) -> list[Tile]:
    """Cut a store's elements into tiles of at most `size`."""
    tiles: list[Tile] = []
    for segment in store.segments:
        done = 0
        while done < segment.length:
            place = segment.owned + done
            begin = place - place % size
            end = min(begin + size, store.owned)
            length = min(segment.length - done, end - place)
            if not tiles or tiles[-1].begin != begin:
                tiles.append(Tile(store, begin, end, []))
            part = Part(segment.entry.group, segment.weights, done, done + length)
            tiles[-1].cuts.append(Cut(segment, part, slice(place - begin, place - begin + length)))
            done += length
    return tiles


class Buffers:
    """Memory for one tile, reused by all tiles of one kind.

    Args:
        size: elements of the longest tile.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._made: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def get(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer of this kind."""
        if (dtype, device) not in self._made:
            self._made[dtype, device] = torch.empty(self.size, dtype=dtype, device=device)
        return self._made[dtype, device]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._made.values())


class Slot:
    """Device memory for one tile at a time; beside a GPU with a stream of its own, in which its tiles follow each other.

    Args:
        nbytes: of the memory.
        device: where it is.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._used = 0
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The slot is another tile's."""
        self._used = 0
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield

    def room(self, dtype: torch.dtype, count: int) -> Tensor:
        """Memory for `count` elements."""
        nbytes = count * dtype.itemsize
        self._used += nbytes
        return self._memory[self._used - nbytes : self._used].view(dtype)

    def fetch(self, host: Tensor) -> Tensor:
        """A copy of a vector."""
        return self.room(host.dtype, host.numel()).copy_(host, non_blocking=True)

    def leave(self) -> None:
        """Have what comes next on the device wait for the slot's tiles."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


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
    step = TiledStep(optimizer)
    visits: dict[Store, _Visits] = {}
    for tile in tiles:
        cuts = [cut for cut in tile.cuts if cut.segment.entry.arrived]
        if not cuts:
            continue
        if tile.store.host:
            if tile.store not in visits:
                visits[tile.store] = _Visits(step, tile.store, max(each.end - each.begin for each in tiles))
            visits[tile.store].update(tile, cuts, factor)
        else:
            _update(step, tile, cuts, buffers, factor)
    step.finish()
    for visit in visits.values():
        visit.finish()


def _update(step: TiledStep, tile: Tile, cuts: list[Cut], buffers: Buffers, factor: Tensor | None) -> None:
    store = tile.store
    loans = []
    for cut in cuts:
        gradient = cut.gradient(store)
        if store.master is not None:
            gradient = buffers.get(torch.float32, store.device)[cut.within].copy_(gradient)
            weights = cut.part.weights if cut.part.whole else cut.part.of(cut.part.weights)
        else:
            room = None if cut.segment.entry.index is None else buffers.get(store.dtype, store.device)[cut.within]
            weights = cut.read(room)
        loans.append(Loan(cut.part, weights, gradient if factor is None else gradient.mul_(factor)))
    step.tile(loans)
    if store.master is not None:
        low = buffers.get(store.dtype, store.device)[: tile.end - tile.begin]
        low.copy_(store.master[tile.begin : tile.end])
        for cut in cuts:
            cut.write(low[cut.within])
    else:
        for cut, loan in zip(cuts, loans, strict=True):
            if cut.segment.entry.index is not None:
                cut.write(loan.weights)


class _Visits:
    """Visits of a store's state in host memory to its device.

    Args:
        step: of the optimizer.
        store: with state in host memory.
        size: elements of the longest tile.
    """

    def __init__(self, step: TiledStep, store: Store, size: int) -> None:
        self._step, self._store = step, store
        self._dtype = store.dtype if store.master is None else store.master.dtype
        vectors = 2 + len(store.states)  # weights and gradient
        self._slots = [Slot(vectors * size * self._dtype.itemsize, store.device) for _ in range(_SLOTS)]
        self._next = cycle(self._slots)
        self._known = dict(store.states)

    def update(self, tile: Tile, cuts: list[Cut], factor: Tensor | None) -> None:
        """Update a tile's elements."""
        store, span = self._store, slice(tile.begin, tile.end)
        slot = next(self._next)
        with slot.turn():
            length = tile.end - tile.begin
            master = slot.room(self._dtype, length) if store.master is None else slot.fetch(store.master[span])
            states = {key: slot.fetch(state[span]) for key, state in self._known.items()}
            gradients = slot.room(self._dtype, length)
            loans = []
            for cut in cuts:
                gradient = gradients[cut.within].copy_(cut.gradient(store))
                if factor is not None:
                    gradient.mul_(factor)
                weights = master[cut.within] if store.master is not None else cut.read(master[cut.within])
                visitors = {key: state[cut.within] for key, state in states.items()}
                loans.append(Loan(cut.part, weights, gradient, visitors, _keeper(store, cut.segment)))
            self._step.tile(loans)
            for cut, loan in zip(cuts, loans, strict=True):
                if store.master is not None:
                    cut.write(loan.weights.to(store.dtype))
                elif cut.segment.entry.index is not None:
                    cut.write(loan.weights)
            if store.master is not None:
                store.master[span].copy_(master, non_blocking=True)
            for key, state in states.items():
                self._known[key][span].copy_(state, non_blocking=True)

    def finish(self) -> None:
        """Have the device wait for all visits."""
        for slot in self._slots:
            slot.leave()


def _keeper(store: Store, segment: Segment) -> Callable[[str, Tensor], Tensor]:
    return lambda key, value: store.state_of(key, segment, value.dtype)
