"""Gradients, master weights and optimizer state of many parameters, end to end in flat vectors.

A store holds the parameters of one dtype and device, or the elements of these that an index keeps, in buckets: one bucket is
reduced in one call. The last parameters come first, because backward brings their gradients first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_plugins.optim.arriving import Expected
from axonn_plugins.optim.index import Index

_LEAST_BYTES, _CALLS = 2**18, 8
"""Fewer bytes a call waste time on latency; more calls let most of the sums run beside backward."""
HALF = (torch.bfloat16, torch.float16)
Ranks = tuple[dist.ProcessGroup | None, int]
"""Who sums a parameter's gradients, and by what the sum is divided."""


def ranks_of(group: dist.ProcessGroup | Callable[[nn.Parameter], Ranks] | None, parameter: nn.Parameter) -> Ranks:
    """Ranks that sum the gradients of a parameter, and the divisor; None: no others."""
    if group is None:
        return None, 1
    return group(parameter) if callable(group) else (group, dist.get_world_size(group))


@dataclass(eq=False)
class Entry:
    """One parameter.

    Attributes:
        name: by which masks and messages call it.
        parameter: the dense tensor that the model computes with, zero where it is pruned.
        group: number of its parameter group.
        index: where its kept elements are; None: all are.
        process_group: the ranks whose gradients are summed; None: no others.
        divisor: by which the sum is divided.
        replicated: axes along which replicas are to have the same gradient after the sum; a bucket's entries agree in them, so that
            a replica has the same elements of the bucket as the others.
        start: where its kept elements begin in the layout of all.
        filled: whether its place among the gradients that are not reduced yet has any.
        arrived: whether it has a gradient since the last step, reduced or not.
    """

    name: str
    parameter: nn.Parameter
    group: int
    index: Index | None = None
    process_group: dist.ProcessGroup | None = None
    divisor: int = 1
    replicated: tuple[str, ...] = ()
    start: int = 0
    filled: bool = False
    arrived: bool = False

    @property
    def kept(self) -> int:
        """Elements that are not pruned."""
        return self.parameter.numel() if self.index is None else self.index.kept

    @property
    def flat(self) -> Tensor:
        """The parameter's elements, as one vector that shares their memory."""
        return self.parameter.detach().view(-1)

    def read(self, dense: Tensor, begin: int, end: int, out: Tensor | None = None) -> Tensor:
        """Kept elements number `begin` to `end` of a flattened tensor of the parameter's shape.

        All of them are a view of it; others are copied, into `out` if that is given.
        """
        return dense[begin:end] if self.index is None else self.index.compress(dense, begin, end, out)

    def write(self, values: Tensor, begin: int) -> None:
        """Put kept elements from number `begin` on into the parameter."""
        if self.index is None:
            self.flat[begin : begin + values.numel()] = values
        else:
            self.index.expand(values, self.flat, begin)

    def dense(self, compressed: Tensor) -> Tensor:
        """A tensor of the parameter's shape with the kept elements of `compressed`, and zeros."""
        if self.index is None:
            return compressed.reshape(self.parameter.shape).clone()
        full = compressed.new_zeros(self.parameter.numel())
        self.index.expand(compressed, full)
        return full.view(self.parameter.shape)


@dataclass(eq=False)
class Bucket:
    """Entries whose gradients are reduced in one call: the elements `begin` to `end` of the layout of all.

    Attributes:
        entries: in the order of the layout.
        begin: where they begin.
        end: where the bucket ends; beyond the last entry there may be padding.
        stage: what each rank holds a share of only: 0 nothing, 1 the state, 2 reduced gradients, too.
        owned: where this rank's share begins in the vectors of what it holds the state of.
        dtype: of gradients.
        local: gradients of all elements, not reduced yet in stage 2, which has them while backward fills it only.
        reduced: in stage 2, whether this rank's share has gradients.
        gather: of weights that are on their way where its gradients will be; None: there are none.
    """

    entries: list[Entry]
    begin: int
    end: int
    stage: int
    owned: int
    dtype: torch.dtype
    local: Tensor | None = None
    reduced: bool = False
    gather: Expected | None = None

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that reduce it; None: no others."""
        return self.entries[0].process_group

    @property
    def divisor(self) -> int:
        """The divisor of the sum."""
        return self.entries[0].divisor

    @cached_property
    def ranks(self) -> int:
        """Number of ranks that reduce it."""
        return 1 if self.process_group is None else dist.get_world_size(self.process_group)

    @property
    def sharded(self) -> bool:
        """True if this rank holds the state of a share of it only."""
        return self.stage > 0 and self.ranks > 1

    @property
    def transient(self) -> bool:
        """True if `local` is there only while backward fills it."""
        return self.stage > 1 and self.ranks > 1

    def room(self) -> Tensor:
        """Memory for all elements: `local`, or new where there is none."""
        if self.gather is not None:
            self.gather.finish()
            self.gather = None
        if self.local is not None:
            return self.local
        return torch.empty(self.end - self.begin, dtype=self.dtype, device=self.entries[0].parameter.device)

    def of(self, entry: Entry, whole: Tensor) -> Tensor:
        """An entry's part of a vector of all of the bucket's elements."""
        return whole[entry.start - self.begin : entry.start - self.begin + entry.kept]

    @cached_property
    def share(self) -> tuple[int, int]:
        """Begin and end of the part whose state this rank holds."""
        if not self.sharded:
            return self.begin, self.end
        length = (self.end - self.begin) // self.ranks
        begin = self.begin + dist.get_rank(self.process_group) * length
        return begin, begin + length


@dataclass(eq=False)
class Segment:
    """Consecutive kept elements of one entry whose state this rank holds.

    Attributes:
        entry: whose.
        begin: number of the first of the entry's kept elements.
        gradient: where they begin in the store's gradient.
        owned: where they begin in the vectors of the elements whose state this rank holds.
        length: how many.
        weights: what the optimizer's state is keyed on: the master weights, or a stand-in of their length and of no size.
    """

    entry: Entry
    begin: int
    gradient: int
    owned: int
    length: int
    weights: Tensor


class Store:
    """All entries of one dtype and device.

    Args:
        buckets: in the order of the layout.
        host: whether master weights and state are in host memory, pinned beside a GPU.

    Attributes:
        gradient: compressed gradients, those that a step reads: of all elements, in stage 2 of this rank's shares.
        master: float32 weights of the elements whose state this rank holds; None where the parameters are precise
            themselves.
        states: with `host`, the optimizer's state by its names, for the same elements.
        owned: how many elements this rank holds the state of, padding included.
        segments: what this rank holds the state of, in the order of its vectors.
    """

    def __init__(self, buckets: list[Bucket], host: bool) -> None:
        self.buckets, self.host = buckets, host
        self.entries = [entry for bucket in buckets for entry in bucket.entries]
        like = self.entries[0].parameter
        self.dtype, self.device = like.dtype, like.device
        self.owned = sum(end - begin for begin, end in (bucket.share for bucket in buckets))
        self._compact = buckets[0].stage > 1
        length = self.owned if self._compact else buckets[-1].end
        self.gradient = torch.zeros(length, dtype=buckets[0].dtype, device=self.device)
        self.master = self._make(torch.float32) if self.dtype in HALF else None
        self.states: dict[str, Tensor] = {}
        for bucket in buckets:
            if not bucket.transient:
                at = self.place(bucket)
                bucket.local = self.gradient[at : at + bucket.end - bucket.begin]
        self.segments = list(self._segments())

    def _make(self, dtype: torch.dtype) -> Tensor:
        if self.host:
            return host_zeros(self.owned, dtype, self.device)
        return torch.zeros(self.owned, dtype=dtype, device=self.device)

    def place(self, bucket: Bucket) -> int:
        """Where a bucket, in stage 2 this rank's share of it, begins in `gradient`."""
        return bucket.owned if self._compact else bucket.begin

    def state_of(self, key: str, segment: Segment, dtype: torch.dtype) -> Tensor:
        """A segment's part of a state in host memory, for which room is made."""
        if key not in self.states:
            self.states[key] = self._make(dtype)
        return self.states[key][segment.owned : segment.owned + segment.length]

    @property
    def nbytes(self) -> int:
        """Bytes of the vectors and indices, on the device and in host memory, optimizer state left out."""
        indices = sum(entry.index.nbytes for entry in self.entries if entry.index is not None)
        return self.gradient.nbytes + (0 if self.master is None else self.master.nbytes) + indices

    def _segments(self) -> Iterator[Segment]:
        nothing = torch.zeros((), dtype=self.dtype, device=self.device)
        for bucket in self.buckets:
            low, high = bucket.share
            moved = bucket.owned - low if self._compact else 0
            for entry in bucket.entries:
                begin, end = max(entry.start, low), min(entry.start + entry.kept, high)
                if begin < end:
                    owned, length = bucket.owned + begin - low, end - begin
                    weights = nothing.expand(length) if self.master is None else self.master[owned : owned + length]
                    yield Segment(entry, begin - entry.start, begin + moved, owned, length, weights)


def host_zeros(length: int, dtype: torch.dtype, beside: torch.device) -> Tensor:
    """Zeros in host memory, pinned beside a GPU."""
    return torch.zeros(length, dtype=dtype, pin_memory=beside.type == "cuda")


def make_stores(
    entries: Iterable[Entry],
    bucket_bytes: int,
    stage: int = 0,
    host: bool = False,
    gradient_dtype: torch.dtype | None = None,
    apart: Container[int] = (),
) -> list[Store]:
    """Lay out the kept elements.

    Args:
        entries: in the order of the model; the last come first in the vectors.
        bucket_bytes: a bucket is full when it has so many, or an eighth of all that its ranks sum, but at least 256 KiB.
        stage: what ranks share: see `Bucket`; buckets are padded so that it divides.
        host: see `Store`.
        gradient_dtype: see `FlatOptimizer`.
        apart: parameter groups that lie in buckets of their own, so that every rank has them at the same places whatever it keeps of others.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[Entry]] = {}
    for entry in reversed(list(entries)):
        by_kind.setdefault((entry.parameter.dtype, entry.parameter.device), []).append(entry)
    stores = []
    for (dtype, _), members in by_kind.items():
        buckets: list[Bucket] = []
        owned, kind = 0, dtype if gradient_dtype is None else torch.promote_types(dtype, gradient_dtype)
        for filling in _fill(members, bucket_bytes // kind.itemsize, _LEAST_BYTES // kind.itemsize, apart):
            begin = buckets[-1].end if buckets else 0
            for entry, start in zip(filling, _starts(filling, begin), strict=True):
                entry.start, entry.filled, entry.arrived = start, False, False
            bucket = Bucket(filling, begin, filling[-1].start + filling[-1].kept, stage, owned, kind)
            if bucket.sharded:
                bucket.end = begin + math.ceil((bucket.end - begin) / bucket.ranks) * bucket.ranks
            buckets.append(bucket)
            owned += bucket.share[1] - bucket.share[0]
        stores.append(Store(buckets, host))
    return stores


_Kind = tuple[dist.ProcessGroup | None, int, tuple[str, ...], bool]


def _fill(members: list[Entry], most: int, least: int, apart: Container[int]) -> Iterator[list[Entry]]:
    """Entries by bucket, which is full at an eighth of the elements that its ranks sum: these rank by rank keep as many, of others not all do."""
    filling: dict[_Kind, list[Entry]] = {}
    totals: dict[_Kind, int] = defaultdict(int)
    kinds = [(entry.process_group, entry.divisor, entry.replicated, entry.group in apart) for entry in members]
    for entry, kind in zip(members, kinds, strict=True):
        totals[kind] += entry.kept
    for entry, kind in zip(members, kinds, strict=True):
        bucket = filling.setdefault(kind, [])
        bucket.append(entry)
        if sum(other.kept for other in bucket) >= min(most, max(least, totals[kind] // _CALLS)):
            yield filling.pop(kind)
    yield from filling.values()


def _starts(entries: list[Entry], begin: int) -> Iterator[int]:
    for entry in entries:
        yield begin
        begin += entry.kept
