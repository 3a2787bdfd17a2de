"""States from one layout of kept elements to another: a rank keeps what stays its own, and sends what others hold from now on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_plugins.optim.index import Index
from axonn_plugins.optim.state import MASTER, agreed, keys_of, own_value
from axonn_plugins.optim.store import Bucket, Entry, Segment, Store

State = Mapping[Tensor, Mapping[str, Any]]


class Layout:
    """Where the states of stores are, taken before their entries are laid out anew.

    Args:
        stores: all of them.
        state: the optimizer's, by `Segment.weights`.
    """

    def __init__(self, stores: Sequence[Store], state: State) -> None:
        self.stores, self.state = stores, dict(state)
        self.indices = {entry: entry.index for store in stores for entry in store.entries}
        self.kept = {entry: entry.kept for store in stores for entry in store.entries}
        self.edges = _edges(stores)

    def forget_gradients(self) -> None:
        """Let the memory of the stores' gradients go."""
        for store in self.stores:
            store.gradient = store.gradient.new_empty(0)
            for bucket in store.buckets:
                bucket.local = None


def _edges(stores: Sequence[Store]) -> dict[Entry, list[int]]:
    """For each entry the first of its kept elements whose state each rank holds, and the one behind the last rank's."""
    found = {}
    for store in stores:
        for bucket in store.buckets:
            ranks = bucket.ranks if bucket.sharded else 1
            length = (bucket.end - bucket.begin) // ranks
            for entry in bucket.entries:
                low = bucket.begin - entry.start
                found[entry] = [min(max(low + rank * length, 0), entry.kept) for rank in range(ranks)] + [entry.kept]
    return found


@dataclass(frozen=True)
class _Way:
    """The elements of one entry that are kept in both layouts.

    Attributes:
        entry: whose.
        leave: which of those that this rank held.
        to: how many of them each rank is to hold.
        come: which of those that this rank is to hold.
        origin: how many of them each rank held.
    """

    entry: Entry
    leave: Tensor
    to: list[int]
    come: Tensor
    origin: list[int]


@torch.no_grad()
def move(before: Layout, stores: Sequence[Store], optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer go on with the states of what stays kept; what is kept anew begins with zeros, and with its parameter's weight.

    Where ranks share states every rank calls it; a bucket of the old layout travels at a time, in one call a state.

    Args:
        before: the layout of the same entries that was.
        stores: all of them, as they are laid out now.
        optimizer: without states.
    """
    edges = _edges(stores)
    new = {segment.entry: (store, segment) for store in stores for segment in store.segments}
    known: dict[int, tuple[Mapping[str, Any], Mapping[str, torch.dtype]]] = {}  # of another of the parameter group
    for store in before.stores:
        old = {segment.entry: segment for segment in store.segments}
        for bucket, values, kinds in agreed(store, before.state):
            with_state = [entry for entry in bucket.entries if entry.name in values]
            known |= {entry.group: (values[entry.name], kinds[entry.name]) for entry in with_state}
            ways = [_way(entry, bucket, before, edges[entry]) for entry in bucket.entries]
            for key, dtype in keys_of(bucket, kinds, store).items():
                travel = [way for way in ways if key == MASTER or key in kinds.get(way.entry.name, {})]
                _travel(key, dtype, bucket, travel, old, before.state, new, optimizer)
            for entry in with_state:
                _put(entry, values[entry.name], new, optimizer)
            for entry in with_state:
                if entry in old:
                    before.state.pop(old[entry].weights, None)
    for entry, kept in before.kept.items():
        if not kept and entry in new and entry.group in known:  # no step has made a state of nothing
            like, vectors = known[entry.group]
            to, segment = new[entry]
            for key, dtype in vectors.items():
                optimizer.state[segment.weights][key] = _room(key, dtype, to, segment)
            _put(entry, like, new, optimizer)


def _way(entry: Entry, bucket: Bucket, before: Layout, edges: list[int]) -> _Way:
    me = dist.get_rank(bucket.process_group) if bucket.sharded else 0
    then, old = before.edges[entry], before.indices[entry]
    leave, to = _both(entry, old, (then[me], then[me + 1]), entry.index, edges)
    come, origin = _both(entry, entry.index, (edges[me], edges[me + 1]), old, then)
    return _Way(entry, leave, to, come, origin)


def _both(
    entry: Entry, index: Index | None, span: tuple[int, int], other: Index | None, edges: list[int]
) -> tuple[Tensor, list[int]]:
    """Which of an index's kept elements in a span another one keeps, too, and how many of these are between its edges."""
    device = entry.parameter.device
    positions = torch.arange(*span, device=device) if index is None else index.positions(*span)
    where, numbers = torch.arange(positions.numel(), device=device), positions
    if other is not None:
        theirs = other.positions()
        numbers = torch.searchsorted(theirs, positions)
        if theirs.numel():
            where = (theirs[numbers.clamp(max=theirs.numel() - 1)] == positions).nonzero().view(-1)
        else:
            where = where[:0]
        numbers = numbers[where]
    cuts = torch.searchsorted(numbers, torch.tensor(edges, device=device))
    # The host has waited for the device: states that are on their way to its memory are there.
    return where, cuts.diff().tolist()


def _travel(
    key: str,
    dtype: torch.dtype,
    bucket: Bucket,
    ways: Sequence[_Way],
    old: Mapping[Entry, Segment],
    state: State,
    new: Mapping[Entry, tuple[Store, Segment]],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Bring one state of a bucket's entries to where it is to be."""
    if not ways:
        return
    device = bucket.entries[0].parameter.device
    pieces = []
    for way in ways:
        segment = old.get(way.entry)
        value = (
            None if segment is None else segment.weights if key == MASTER else state.get(segment.weights, {}).get(key)
        )
        value = (
            torch.zeros(len(way.leave), dtype=dtype, device=device)
            if value is None
            else value[way.leave.to(value.device)]
        )
        pieces.append(value.to(device).split(way.to))
    if bucket.sharded:
        flat = torch.cat([piece for to in zip(*pieces, strict=True) for piece in to])
        sizes = [[way.origin[rank] for way in ways] for rank in range(bucket.ranks)]
        received = flat.new_empty(sum(map(sum, sizes)))
        to = [sum(way.to[rank] for way in ways) for rank in range(bucket.ranks)]
        dist.all_to_all_single(received, flat, [sum(size) for size in sizes], to, group=bucket.process_group)
        by_rank = [part.split(size) for part, size in zip(received.split([sum(s) for s in sizes]), sizes, strict=True)]
        pieces = list(zip(*by_rank, strict=True))
    for way, parts in zip(ways, pieces, strict=True):
        if way.entry in new:
            store, segment = new[way.entry]
            room = segment.weights if key == MASTER else _room(key, dtype, store, segment)
            room[way.come.to(room.device)] = torch.cat(parts).to(room.device)
            if key != MASTER:
                optimizer.state[segment.weights][key] = room


def _room(key: str, dtype: torch.dtype, store: Store, segment: Segment) -> Tensor:
    if store.host:
        return store.state_of(key, segment, dtype)
    return torch.zeros(segment.length, dtype=dtype, device=store.device)


def _put(
    entry: Entry,
    values: Mapping[str, Any],
    new: Mapping[Entry, tuple[Store, Segment]],
    optimizer: torch.optim.Optimizer,
) -> None:
    if entry in new:
        store, segment = new[entry]
        options = optimizer.param_groups[entry.group]
        optimizer.state[segment.weights].update(
            {key: own_value(value, store, options) for key, value in values.items()}
        )
