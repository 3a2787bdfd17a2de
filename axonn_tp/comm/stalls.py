"""Calls that the ranks of a group must make together, in order, and an end in words where ranks that wait for each other made others.

A layer whose weight lies on z, or whose experts lie on other ranks, communicates whenever it is called; where code calls it on some
ranks alone, these wait for ever. Nothing is exchanged while all goes well. A rank that has called nothing more for `SECONDS` puts its
list into the store and reads the others': two lists that differ in one place will never meet, and the job ends.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

SECONDS = 30.0
"""Seconds without a call after which a rank asks the others."""
_LOOK, _LONGEST, _GRACE, _PATIENCE = 2.0, 10.0, 15.0, 5.0
_MOST = 4096
BACKWARD, GRADIENTS = "its backward pass", "the sum of gradients"
ADVICE = (
    "call the same layers on every rank, with a sample's worth of zeros where a rank has none for one (times 0, so that nothing learns from "
    'it), or give a dense layer {"kind": "replicated"} in the plan'
)


class Calls:
    """This rank's calls that other ranks make, too.

    Args:
        ranks: that call together.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = tuple(ranks)
        self.count = 0
        self._last: deque[str] = deque(maxlen=_MOST)

    def note(self, what: str) -> None:
        """A call is about to be made; `what` is a noun."""
        self._last.append(what)
        self.count += 1

    def record(self) -> str:
        """The last calls, for others."""
        last = list(self._last)
        table = {what: number for number, what in enumerate(dict.fromkeys(last))}
        known = {"first": self.count - len(last), "table": list(table), "calls": [table[what] for what in last]}
        return base64.b85encode(zlib.compress(json.dumps(known).encode())).decode()

    def difference(self, record: bytes | str) -> tuple[str, str] | None:
        """The first call in which another rank's record differs from this rank's, as it is here and there; None where none is known."""
        theirs = json.loads(zlib.decompress(base64.b85decode(record)))
        last = list(self._last)
        first, other = self.count - len(last), theirs["first"]
        start = max(first, other)
        named = [theirs["table"][number] for number in theirs["calls"][start - other :]]
        return next(((a, b) for a, b in zip(last[start - first :], named, strict=False) if a != b), None)


class _Watch:
    """A thread that looks now and then whether this rank goes on."""

    made = 0

    def __init__(self, world: dist.ProcessGroup) -> None:
        self._world = ref(world)
        self.logs: dict[tuple[int, ...], Calls] = {}
        _Watch.made += 1
        self._number, self._rank, self._size = _Watch.made, world.rank(), world.size()
        store: Any = dist.distributed_c10d._get_default_store()
        # A connection of its own: another thread may be waiting on that one.
        self._store = store
        with suppress(AttributeError, RuntimeError):  # stores that have no connection
            self._store = store.clone()
        threading.Thread(target=self._look, name="axonn-stalls", daemon=True).start()

    def _look(self) -> None:
        with suppress(RuntimeError):  # the store goes with the job
            before, since, nap = -1, time.monotonic(), _LOOK
            while True:
                time.sleep(min(nap, SECONDS / 2))
                if self._world() is not dist.group.WORLD:
                    break
                count = sum(calls.count for calls in list(self.logs.values()))
                if count != before:
                    if nap > _LOOK:
                        self._withdraw()
                    before, since, nap = count, time.monotonic(), _LOOK
                elif time.monotonic() - since >= SECONDS:
                    if nap == _LOOK:
                        self._tell()
                    nap = min(1.5 * nap, _LONGEST)
                    self._compare()
            self._withdraw()

    def _key(self, ranks: tuple[int, ...], rank: int) -> str:
        return f"axonn calls {self._number} of {zlib.crc32(repr(ranks).encode())} on {rank}"

    def _tell(self) -> None:
        for ranks, calls in list(self.logs.items()):
            self._store.set(self._key(ranks, self._rank), calls.record())

    def _withdraw(self) -> None:
        for ranks in list(self.logs):
            self._store.delete_key(self._key(ranks, self._rank))

    def _compare(self) -> None:
        verdict = f"axonn calls {self._number} verdict"
        if self._store.check([verdict]):
            self._end(self._store.get(verdict).decode())
        for calls in list(self.logs.values()):
            if (said := self._difference(calls)) is not None:
                self._end(said)

    def why(self, calls: Calls) -> str | None:
        """Why a collective has failed that a group's ranks have all called: the sentence, where their lists differ.

        None as well where the store has gone with the rank that is lost, or is held up with it: a thread waits for that.
        """
        found: SimpleQueue[str | None] = SimpleQueue()

        def compare() -> None:
            deadline = time.monotonic() + _PATIENCE
            with suppress(RuntimeError):
                self._tell()
                while time.monotonic() < deadline:
                    if (said := self._difference(calls)) is not None:
                        return found.put(said)
                    time.sleep(0.05)
            found.put(None)

        threading.Thread(target=compare, name="axonn-stalls-why", daemon=True).start()
        with suppress(Empty):
            return found.get(timeout=_PATIENCE + 1.0)
        return None

    def _difference(self, calls: Calls) -> str | None:
        for rank in calls.ranks:
            key = self._key(calls.ranks, rank)
            if rank == self._rank or not self._store.check([key]):
                continue
            found = calls.difference(self._store.get(key))
            if found is not None:
                here, there = found
                verdict = f"axonn calls {self._number} verdict"
                return self._store.compare_set(verdict, "", differ((self._rank, here), (rank, there))).decode()
        return None

    def _end(self, said: str) -> None:
        """End this process, the last of those that have been told."""
        sys.stdout.flush()
        print(f"axonn: {said}", file=sys.stderr, flush=True)
        with suppress(RuntimeError):
            told, deadline = f"axonn calls {self._number} told", time.monotonic() + _GRACE
            here = self._store.add(told, 1)
            while here < self._size and time.monotonic() < deadline:
                time.sleep(0.1)
                here = self._store.add(told, 0)
        os._exit(1)


def differ(one: tuple[int, str], other: tuple[int, str]) -> str:
    """The sentence about two ranks that made different calls in one place.

    Args:
        one: a rank, and what it called.
        other: another.
    """
    (low, here), (high, there) = sorted((one, other))
    return (
        f"rank {low} called {here} where rank {high} called {there}, and both exchange tokens or weights with the other in each, so that they "
        f"would wait for ever; {ADVICE}"
    )


_watches: WeakKeyDictionary[dist.ProcessGroup, _Watch] = WeakKeyDictionary()
_known: WeakKeyDictionary[dist.ProcessGroup, Calls] = WeakKeyDictionary()


def calls_of(group: dist.ProcessGroup) -> Calls:
    """The list of this rank's calls with a group; groups of the same ranks share one."""
    found = _known.get(group)
    if found is None:
        world: Any = dist.group.WORLD
        if world not in _watches:
            _watches[world] = _Watch(world)
        ranks = tuple(dist.get_process_group_ranks(group))
        found = _known[group] = _watches[world].logs.setdefault(ranks, Calls(ranks))
    return found


@contextmanager
def explained(group: dist.ProcessGroup) -> Iterator[None]:
    """Where a collective inside fails because ranks made different calls, say which.

    Args:
        group: whose ranks are in the collective.

    Raises:
        ValueError: the sentence, in the place of the backend's error.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        said = _watches[dist.group.WORLD].why(calls_of(group))  # type: ignore[index]
        if said is None:
            raise
        raise ValueError(said) from error


def step_ends() -> None:
    """Note that this rank comes to the sum of its gradients."""
    watch = _watches.get(dist.group.WORLD) if dist.is_initialized() else None  # type: ignore[arg-type]
    for calls in list(watch.logs.values()) if watch is not None else ():
        calls.note(GRADIENTS)
