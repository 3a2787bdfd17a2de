"""Weights of which ranks hold the state of a share each: gathered behind a step, or while the next forward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_plugins.optim.arriving import expect, nobody_else_reads
from axonn_plugins.optim.store import Bucket, Entry, Segment, Store

Landed = Callable[[list[Entry]], None]


@dataclass(eq=False)
class Gather:
    """A bucket's all-gather that is under way.

    Attributes:
        bucket: which.
        whole: where its elements arrive; the gradients, which are spent, are there.
        share: this rank's, which has to live until then.
        size: elements written at a time.
        landed: called with the bucket's entries once they are written.
        handle: of the collective.
    """

    bucket: Bucket
    whole: Tensor
    share: Tensor
    size: int
    landed: Landed | None
    handle: Any

    def land(self) -> None:
        """Wait for the weights, and write them into the parameters."""
        self.handle.wait()
        for entry in self.bucket.entries:
            weights = self.bucket.of(entry, self.whole)
            for done in range(0, entry.kept, self.size):
                entry.write(weights[done : done + self.size], done)
        if self.landed is not None:
            self.landed(self.bucket.entries)


def gather(share: Tensor, bucket: Bucket) -> Tensor:
    """All of a bucket's elements, of which ranks hold a share each, in its order."""
    if not bucket.sharded:
        return share
    whole = share.new_empty(bucket.end - bucket.begin)
    dist.all_gather_into_tensor(whole, share.contiguous(), group=bucket.process_group)
    return whole


def gather_weights(stores: list[Store], size: int, landed: Landed | None = None) -> None:
    """Have every rank's parameters be what the ranks that hold their state made of them.

    Args:
        stores: all of them.
        size: elements written at a time.
        landed: see `Gather`.
    """
    travelling: list[Gather] = []
    for store in stores:
        for one in _begin(store, store.buckets, size, landed):
            travelling.append(one)
            if one.bucket.transient:
                _land(travelling)
    _land(travelling)


def begin_gathers(stores: list[Store], size: int, landed: Landed) -> None:
    """The same while the next forward pass runs: whoever uses a parameter first waits for it. Not in stage 2.

    The first layers' weights, which the pass needs first, are in the last buckets. A bucket with a parameter whose memory somebody
    else reads, too (a view that a script keeps), is waited for at once.

    Args:
        stores: all of them.
        size: elements written at a time.
        landed: see `Gather`.
    """
    waited: list[Gather] = []
    for store in stores:
        for one in _begin(store, store.buckets[::-1], size, landed):
            parameters = [entry.parameter for entry in one.bucket.entries]
            if nobody_else_reads(parameters):
                one.bucket.gather = expect(parameters, one.land)
            else:
                waited.append(one)
    _land(waited)


def land_all(stores: list[Store]) -> None:
    """Wait for all weights that are on their way into these stores' parameters."""
    for bucket in (bucket for store in stores for bucket in store.buckets):
        if bucket.gather is not None:
            bucket.gather.finish()


def _begin(store: Store, buckets: list[Bucket], size: int, landed: Landed | None) -> Iterator[Gather]:
    segments: dict[Bucket, list[Segment]] = {}
    owners = {entry: bucket for bucket in buckets if bucket.sharded for entry in bucket.entries}
    for segment in store.segments:
        if segment.entry in owners:
            segments.setdefault(owners[segment.entry], []).append(segment)
    for bucket in filter(lambda bucket: bucket.sharded, buckets):
        begin, end = bucket.share
        share = torch.empty(end - begin, dtype=store.dtype, device=store.device)
        for segment in segments.get(bucket, ()):
            at, entry = segment.owned - bucket.owned, segment.entry
            share[at : at + segment.length] = entry.read(entry.flat, segment.begin, segment.begin + segment.length)
        room = bucket.room()
        whole = room.view(store.dtype)[: room.numel()]
        handle = dist.all_gather_into_tensor(whole, share, group=bucket.process_group, async_op=True)
        yield Gather(bucket, whole, share, size, landed, handle)


def _land(travelling: list[Gather]) -> None:
    """Take up weights in the order in which they were sent off."""
    while travelling:
        travelling.pop(0).land()
