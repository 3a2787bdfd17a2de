"""Compressed gradients and master weights of many parameters, end to end in flat vectors.

A store holds the parameters of one dtype and device. Its gradient vector has room for every kept element, in buckets: one
bucket is reduced in one call. The last parameters come first, because backward brings their gradients first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samo.index import Index


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
        start: where its kept elements begin in the gradient vector.
        arrived: whether a backward pass has brought a gradient since the last step.
    """

    name: str
    parameter: nn.Parameter
    group: int
    index: Index | None = None
    process_group: dist.ProcessGroup | None = None
    divisor: int = 1
    start: int = 0
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
    """Entries whose gradients are reduced in one call: the elements `begin` to `end` of the gradient vector.

    Attributes:
        entries: in the order of the vector.
        begin: where they begin.
        end: where the bucket ends; beyond the last entry there may be padding.
    """

    entries: list[Entry]
    begin: int
    end: int

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that reduce it; None: no others."""
        return self.entries[0].process_group

    @property
    def divisor(self) -> int:
        """By which the sum is divided."""
        return self.entries[0].divisor

    @property
    def ranks(self) -> int:
        """How many ranks reduce it."""
        return 1 if self.process_group is None else dist.get_world_size(self.process_group)

    def share(self, shard: bool) -> tuple[int, int]:
        """Begin and end of the part whose state this rank holds."""
        if not shard or self.ranks == 1:
            return self.begin, self.end
        length = (self.end - self.begin) // self.ranks
        begin = self.begin + dist.get_rank(self.process_group) * length
        return begin, begin + length


@dataclass(frozen=True)
class Segment:
    """Consecutive kept elements of one entry whose state this rank holds.

    Attributes:
        entry: whose.
        begin: number of the first of the entry's kept elements.
        gradient: where they begin in the gradient vector.
        master: where they begin in the vector of the elements whose state this rank holds.
        length: how many.
    """

    entry: Entry
    begin: int
    gradient: int
    master: int
    length: int


@dataclass(eq=False)
class Store:
    """All entries of one dtype and device.

    Attributes:
        buckets: in the order of the gradient vector.
        gradient: compressed gradients, in the parameters' dtype.
        master: float32 weights of the elements whose state this rank holds; None where the parameters are precise
            themselves.
        shard: whether each rank holds the state of its share of each bucket only.
        owned: how many elements this rank holds the state of, padding included.
    """

    buckets: list[Bucket]
    gradient: Tensor
    shard: bool
    owned: int = 0
    master: Tensor | None = None
    entries: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.entries = [entry for bucket in self.buckets for entry in bucket.entries]
        self.owned = sum(end - begin for begin, end in (bucket.share(self.shard) for bucket in self.buckets))
        if self.gradient.dtype in (torch.bfloat16, torch.float16):
            self.master = torch.zeros(self.owned, dtype=torch.float32, device=self.gradient.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the vectors and indices."""
        indices = sum(entry.index.nbytes for entry in self.entries if entry.index is not None)
        return self.gradient.nbytes + (0 if self.master is None else self.master.nbytes) + indices

    def segments(self) -> Iterator[Segment]:
        """What this rank holds the state of, in the order of the vector."""
        before = 0
        for bucket in self.buckets:
            low, high = bucket.share(self.shard)
            for entry in bucket.entries:
                begin, end = max(entry.start, low), min(entry.start + entry.kept, high)
                if begin < end:
                    yield Segment(entry, begin - entry.start, begin, before + begin - low, end - begin)
            before += high - low


def make_stores(entries: Iterable[Entry], bucket_bytes: int, shard: bool) -> list[Store]:
    """Lay out the kept elements.

    Args:
        entries: in the order of the model; the last come first in the vectors.
        bucket_bytes: a bucket is full when it has so many.
        shard: whether ranks share the state; buckets are then padded so that it divides.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[Entry]] = {}
    for entry in reversed(list(entries)):
        by_kind.setdefault((entry.parameter.dtype, entry.parameter.device), []).append(entry)
    stores = []
    for (dtype, device), members in by_kind.items():
        buckets: list[Bucket] = []
        for filling in _fill(members, bucket_bytes // dtype.itemsize):
            begin = buckets[-1].end if buckets else 0
            for entry, start in zip(filling, _starts(filling, begin), strict=True):
                entry.start = start
            bucket = Bucket(filling, begin, filling[-1].start + filling[-1].kept)
            if shard:
                bucket.end = begin + math.ceil((bucket.end - begin) / bucket.ranks) * bucket.ranks
            buckets.append(bucket)
        length = buckets[-1].end
        stores.append(Store(buckets, torch.zeros(length, dtype=dtype, device=device), shard))
    return stores


def _fill(members: list[Entry], most: int) -> Iterator[list[Entry]]:
    filling: dict[tuple[dist.ProcessGroup | None, int], list[Entry]] = {}
    for entry in members:
        kind = entry.process_group, entry.divisor
        bucket = filling.setdefault(kind, [])
        bucket.append(entry)
        if sum(other.kept for other in bucket) >= most:
            yield filling.pop(kind)
    yield from filling.values()


def _starts(entries: list[Entry], begin: int) -> Iterator[int]:
    for entry in entries:
        yield begin
        begin += entry.kept
