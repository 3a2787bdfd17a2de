"""Gradients summed over the data-parallel ranks while backward runs, bucket by bucket."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_plugins.optim.store import Bucket, Entry, Store
from axonn_tp.comm.collectives import wait
from axonn_tp.comm.gloo_reduce_scatter import fewer_in_parts, start_parts, sum_parts
from axonn_tp.comm.stalls import step_ends

_Order = list[tuple[Store, Bucket]]
FLAG_BYTES = 4
"""Bytes of a flag: each round and group has one that says if a rank begins another round, and one that says if it had a gradient of each parameter."""
_ELSEWHERE = "another rank that sums gradients with this one found a parameter that was changed by .data since the last step, and says which"
_AHEAD = 2  # buckets of stage 2 whose gradients may be on their way at a time


@dataclass(eq=False)
class _Work:
    """The reduction of a bucket that is under way.

    Attributes:
        bucket: which.
        handle: of the collective; None: there was none.
        into: where this rank's share will be in the store's gradient; None: all ranks have all of it, in place.
        share: the share; None: it is made in place.
        gradient: what is reduced, which has to live until then.
    """

    bucket: Bucket
    handle: Any
    into: Tensor | None
    share: Tensor | None
    gradient: Tensor

    def wait(self) -> None:
        if self.handle is not None:
            self.handle.wait()
        if self.into is not None and self.share is not None:
            self.into.add_(self.share) if self.bucket.reduced else self.into.copy_(self.share)
        self.bucket.reduced = self.bucket.transient


class Reducer:
    """Sums each bucket over its ranks as soon as backward has brought all of its gradients, and divides it.

    Buckets are reduced in rounds, in one order on all ranks, whatever the order in which gradients come. A round ends with
    the last bucket; when a second backward pass brings a gradient that the round has had, what the first did not bring is
    reduced, as zeros, and the next round begins. `finish` reduces what is left: a gradient that only some ranks have counts
    on all, one that none has stays away, and a rank takes part in the rounds that others had, with zeros, where its own
    passes brought it less or nothing.

    Args:
        stores: all of them.
        pruned: ranks that do not sum a parameter's gradients with this one may keep more or less of it, and so have other buckets. Buckets of few ranks
            then come before those of more, which hold them all: else these would begin at other places of backward, among its own calls, and be
            waited for in a circle.
        look: gives a sentence where no step may follow, which every rank that sums gradients with this one then ends with.

    Attributes:
        active: whether gradients are reduced as they come; else they are only accumulated, in all stages, and `finish`
            reduces them.
    """

    def __init__(
        self, stores: list[Store], pruned: bool = False, look: Callable[[], str | None] = lambda: None
    ) -> None:
        self.active, self._look = True, look
        self._order = [
            (store, bucket)
            for store in stores
            for bucket in store.buckets
            if (bucket.ranks > 1 or bucket.divisor != 1) and bucket.end > bucket.begin
        ]
        if pruned:
            self._order.sort(key=lambda one: one[1].ranks)
        self._bucket_of = {entry: bucket for store in stores for bucket in store.buckets for entry in bucket.entries}
        self._reduced: dict[dist.ProcessGroup | None, list[Entry]] = {}
        for _, bucket in self._order:
            self._reduced.setdefault(bucket.process_group, []).extend(bucket.entries)
        self._under_way: list[_Work] = []
        self._finished = False
        self._begin_round()

    def _begin_round(self) -> None:
        self._next = 0
        self._seen: set[Entry] = set()
        self._missing = {bucket: len(bucket.entries) for _, bucket in self._order}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in the ``with`` block only accumulate."""
        before, self.active = self.active, False
        try:
            yield
        finally:
            self.active = before

    def place(self, entry: Entry) -> Tensor:
        """Where this rank's gradient of an entry is accumulated until it is reduced.

        Call it before each write: a second pass must not write to what is being reduced.
        """
        if self._finished or entry in self._seen:
            if not self._finished:
                self._end_round(self._order, 1.0)
            self._reopen(self._order)
        bucket = self._bucket_of[entry]
        bucket.local = bucket.room()
        return bucket.of(entry, bucket.local)

    def written(self, entry: Entry) -> None:
        """Call when a gradient has been written."""
        entry.filled = entry.arrived = True
        if not self.active:
            return
        self._seen.add(entry)
        bucket = self._bucket_of[entry]
        if bucket not in self._missing:
            return
        self._missing[bucket] -= 1
        while self._next < len(self._order) and not self._missing[self._order[self._next][1]]:
            self._launch(*self._order[self._next])
            self._next += 1

    def gradient_of(self, entry: Entry) -> Tensor:
        """The gradient of an entry so far, zeros where nothing has come; changes in place count.

        Returns:
            A vector of its kept elements: of this rank's gradients, or after they were reduced of all ranks'.

        Raises:
            RuntimeError: ranks have a share each of what was reduced.
        """
        bucket = self._bucket_of[entry]
        launched = any(bucket is other for _, other in self._order[: self._next])
        if bucket.sharded and (launched or bucket.reduced):
            raise RuntimeError(
                f"the gradient of {entry.name!r} is reduced, and each rank keeps a share of it; let backward accumulate "
                "(no_sync, or reducer.active = False), and take it before the step"
            )
        if launched:
            self._wait()
        bucket.local = bucket.room()
        place = bucket.of(entry, bucket.local)
        if not entry.filled:
            entry.filled = entry.arrived = True
            place.zero_()
        return place

    def finish(self) -> None:
        """Reduce what is left on any rank, and wait for all of it; every rank calls it. What has come on no rank stays away.

        Raises:
            RuntimeError: a rank's `look` has found something.
        """
        if self._finished:
            return
        step_ends()
        refused = self._look()
        came: set[Entry] = set()
        left = self._order
        while left:
            more = set()
            for group, values in self._end_round(left, math.nan if refused else 0.0).items():
                another, *arrived = values.tolist()
                if math.isnan(another):
                    refused = refused or _ELSEWHERE
                more |= {group} if another else set()
                came.update(entry for entry, here in zip(self._reduced[group], arrived, strict=True) if here)
            if refused:
                break
            left = [(store, bucket) for store, bucket in left if bucket.process_group in more]
            if left:
                self._reopen(left)
        if refused:
            raise RuntimeError(refused)
        self._finished = True
        for entry in came:
            entry.arrived = True

    def end_pass(self) -> None:
        """The same behind every backward pass of a step, for hosts that reduce behind each: also where it brought nothing."""
        if self._finished:
            self._reopen(self._order)
        self.finish()

    def forget(self) -> None:
        """Wait for what is under way, and have no gradients any more."""
        if self._seen:
            self.finish()
        for entry, bucket in self._bucket_of.items():
            entry.filled = entry.arrived = bucket.reduced = False
            if bucket.transient:
                bucket.local = None
        self._finished = False
        self._begin_round()

    def _end_round(self, order: _Order, more: float) -> dict[dist.ProcessGroup | None, Tensor]:
        """Reduce what is left of a round, and tell the others where this rank is.

        Args:
            order: the round's buckets.
            more: 1 if this rank begins another round; not a number if it ends with an error.

        Returns:
            By group, how many of its ranks begin another, and how many have had a gradient of each of its parameters.
        """
        for store, bucket in order[self._next :]:
            self._launch(store, bucket)
        self._next = len(self._order)
        said = {}
        for group, bucket in {bucket.process_group: bucket for _, bucket in order}.items():
            flags = [more, *(float(entry.arrived) for entry in self._reduced[group])]
            said[group] = values = torch.tensor(flags, device=bucket.entries[0].parameter.device)
            if bucket.ranks > 1:
                handle = dist.all_reduce(values, group=group, async_op=True)
                self._under_way.append(_Work(bucket, handle, None, None, values))
        self._wait()
        return said

    def _wait(self, leave: int = 0) -> None:
        while len(self._under_way) > leave:
            self._under_way.pop(0).wait()

    def _reopen(self, order: _Order) -> None:
        """Begin a round; what is reduced in place is to come out as it is when it is reduced again with what is added."""
        for _, bucket in order:
            if bucket.transient:
                continue
            whole = bucket.room()
            if bucket.sharded:
                begin, end = (edge - bucket.begin for edge in bucket.share)
                whole[:begin] = 0
                whole[end:] = 0
                whole[begin:end] *= bucket.divisor
            elif bucket.divisor != bucket.ranks:
                whole *= bucket.divisor / bucket.ranks
        self._finished = False
        self._begin_round()

    def _launch(self, store: Store, bucket: Bucket) -> None:
        whole = bucket.room()
        for entry in bucket.entries:
            if not entry.filled:
                bucket.of(entry, whole).zero_()
            entry.filled = not bucket.transient
        # Divided first: a sum of 16-bit gradients may overflow where their mean does not.
        whole.div_(bucket.divisor)
        handle, into, share = None, None, None
        if bucket.sharded:
            begin, end = bucket.share
            at = store.place(bucket) if bucket.transient else begin
            into = store.gradient[at : at + end - begin]
            share = torch.empty_like(into) if bucket.reduced or not bucket.transient else None
            target = into if share is None else share
            handle = _start_share(target, whole, bucket.process_group)
        elif bucket.ranks > 1:
            handle = dist.all_reduce(whole, group=bucket.process_group, async_op=True)
        if bucket.transient:
            bucket.local = None
        self._under_way.append(_Work(bucket, handle, into, share, whole))
        if bucket.transient:
            self._wait(_AHEAD)


class _Parts:
    """A reduce-scatter by exchanged shares that is under way.

    Args:
        target: for this rank's share of the sum.
        whole: what is summed.
        group: the ranks.
    """

    def __init__(self, target: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
        self._target, self._group, self._parts = target, group, start_parts(whole, group)

    def wait(self) -> None:
        self._target.copy_(sum_parts(wait(self._parts), self._group))


def _start_share(target: Tensor, whole: Tensor, group: dist.ProcessGroup | None) -> Any:
    """Begin a reduce-scatter, with fewer bytes than gloo's own where that is the backend; of 16 bits it rounds as an all-reduce does."""
    if group is not None and whole.element_size() > 2 and fewer_in_parts(group, whole):
        return _Parts(target, whole, group)
    return dist.reduce_scatter_tensor(target, whole, group=group, async_op=True)
