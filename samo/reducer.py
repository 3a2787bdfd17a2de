"""Compressed gradients summed over the data-parallel ranks while backward runs (000, section 4.2: 2fφ bytes)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samo.store import Bucket, Entry, Store


class Reducer:
    """Sums each bucket over its ranks as soon as backward has brought all of its gradients, and divides it.

    Buckets are reduced in one order on all ranks, whatever the order in which gradients come. What a pass did not bring
    is reduced by `finish`, as zeros or as what earlier passes brought.

    Args:
        stores: all of them.
    """

    def __init__(self, stores: list[Store]) -> None:
        self.active = True
        buckets = [(store, bucket) for store in stores for bucket in store.buckets]
        self._order = [(store, bucket) for store, bucket in buckets if bucket.ranks > 1 or bucket.divisor > 1]
        self._bucket_of = {entry: bucket for _, bucket in self._order for entry in bucket.entries}
        self._missing = {bucket: set(bucket.entries) for _, bucket in self._order}
        self._launched: list[tuple[Store, Bucket, Any, Tensor | None]] = []

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in the ``with`` block only accumulate."""
        before, self.active = self.active, False
        try:
            yield
        finally:
            self.active = before

    def before(self, entry: Entry) -> None:
        """Call before a gradient is written: a second pass must not write to what is being reduced."""
        bucket = self._bucket_of.get(entry)
        if bucket is not None and any(bucket is launched for _, launched, _, _ in self._launched):
            self.finish()

    def after(self, entry: Entry) -> None:
        """Call when a gradient has been written."""
        bucket = self._bucket_of.get(entry)
        if bucket is None or not self.active:
            return
        self._missing[bucket].discard(entry)
        while len(self._launched) < len(self._order) and not self._missing[self._order[len(self._launched)][1]]:
            self._launch()

    def finish(self) -> None:
        """Reduce what is left, and wait for all of it."""
        while len(self._launched) < len(self._order):
            self._launch()
        for store, bucket, work, own in self._launched:
            if work is not None:
                work.wait()
            if own is not None:
                begin, end = bucket.share(store.shard)
                store.gradient[begin:end] = own
        self._launched = []
        self._missing = {bucket: set(bucket.entries) for _, bucket in self._order}

    def _launch(self) -> None:
        store, bucket = self._order[len(self._launched)]
        for entry in bucket.entries:
            if not entry.arrived:
                store.gradient[entry.start : entry.start + entry.kept] = 0
        whole = store.gradient[bucket.begin : bucket.end]
        # Divided first: a sum of 16-bit gradients may overflow where their mean does not.
        whole.div_(bucket.divisor)
        own, work = None, None
        if bucket.ranks == 1:
            pass
        elif store.shard:
            begin, end = bucket.share(True)
            own = torch.empty_like(whole[: end - begin])
            work = dist.reduce_scatter_tensor(own, whole, group=bucket.process_group, async_op=True)
        else:
            work = dist.all_reduce(whole, group=bucket.process_group, async_op=True)
        self._launched.append((store, bucket, work, own))


def gather(owned: Tensor, bucket: Bucket, into: Tensor) -> None:
    """Collect a bucket from the ranks that each hold a share of it.

    Args:
        owned: this rank's share.
        bucket: the bucket.
        into: room for all of it, on every rank.
    """
    if bucket.ranks == 1:
        into.copy_(owned)
    else:
        dist.all_gather_into_tensor(into, owned.contiguous(), group=bucket.process_group)
