"""Process groups as NCCL's are when the world knows its device, for threads of one process that stand for ranks.

What a rank posts to a group is done one after another in that order, whichever rank it is for: a send whose turn has come is
there for the other to take (or has left, where it fits the library's buffers), a receive whose turn has come takes it. The first message from one rank to
another lets neither go on until the other has posted its own (ncclTransportP2pSetup). Messages know no tags.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor


class World:
    """The ranks.

    Args:
        buffered: whether a send whose turn has come leaves at once.
        connecting: whether a first message holds up who posts it.
        timeout: seconds that it may.

    Attributes:
        groups: in the order in which they were made.
    """

    def __init__(self, buffered: bool, connecting: bool, timeout: float) -> None:
        self.buffered, self.connecting, self.timeout = buffered, connecting, timeout
        self.changed = threading.Condition()
        self.groups: list[Group] = []
        self._mine = threading.local()

    def run(self, ranks: int, work: Callable[[int], Any]) -> list[Any]:
        """Results or exceptions of `work(rank)`, by rank."""
        found: list[Any] = [None] * ranks

        def become(rank: int) -> None:
            self._mine.rank, self._mine.made = rank, 0
            try:
                found[rank] = work(rank)
            except Exception as error:  # for whoever asks what happened
                found[rank] = error

        threads = [threading.Thread(target=become, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def get_rank(self) -> int:
        return self._mine.rank

    def new_group(self, ranks: Sequence[int], timeout: timedelta | None = None) -> Group:
        """The group that this is on every rank, all of which make the same in one order."""
        number, self._mine.made = self._mine.made, self._mine.made + 1
        with self.changed:
            if number == len(self.groups):
                self.groups.append(Group(self, sorted(ranks)))
        assert self.groups[number].ranks == sorted(ranks), "every rank makes the same groups in the same order"
        return self.groups[number]

    def settle(self) -> None:
        """Wait for all that this rank has posted, as whatever has the whole device wait does."""
        rank = self.get_rank()
        mine = [(group, group.ranks.index(rank)) for group in self.groups if rank in group.ranks]
        self.wait_for(lambda: not any(group.streams[own] for group, own in mine), self.timeout)

    def wait_for(self, so: Callable[[], bool], timeout: float) -> None:
        with self.changed:
            if not self.changed.wait_for(so, timeout):
                raise RuntimeError("timed out")


class Posted:
    """A message that one rank has posted."""

    def __init__(self, world: World, buffer: Tensor, sends: bool, peer: int) -> None:
        self.world, self.buffer, self.sends, self.peer = world, buffer, sends, peer
        self.finished = False

    def is_completed(self) -> bool:
        return self.finished

    def wait(self, timeout: timedelta) -> bool:
        self.world.wait_for(lambda: self.finished, timeout.total_seconds())
        return True


class Group:
    """One communicator, with a stream on each rank."""

    def __init__(self, world: World, ranks: list[int]) -> None:
        self.world, self.ranks = world, ranks
        self.streams: list[deque[Posted]] = [deque() for _ in ranks]
        self.left: dict[tuple[int, int], deque[Tensor]] = {}
        self.met: set[tuple[int, int, bool]] = set()

    def send(self, buffers: list[Tensor], peer: int, tag: int) -> Posted:
        return self._post(buffers[0], True, peer)

    def recv(self, buffers: list[Tensor], peer: int, tag: int) -> Posted:
        return self._post(buffers[0], False, peer)

    def _post(self, buffer: Tensor, sends: bool, peer: int) -> Posted:
        own, posted = self.ranks.index(self.world.get_rank()), Posted(self.world, buffer, sends, peer)
        with self.world.changed:
            self.met.add((own, peer, sends))
            self.streams[own].append(posted)
            while any([self._turn(rank) for rank in range(len(self.ranks))]):
                pass
            self.world.changed.notify_all()
        if self.world.connecting:
            self.world.wait_for(lambda: (peer, own, not sends) in self.met, self.world.timeout)
        return posted

    def _turn(self, rank: int) -> bool:
        """Do what has its turn on a rank, if it can be; returns whether it could."""
        stream = self.streams[rank]
        if not stream:
            return False
        head = stream[0]
        if head.sends:
            if not self.world.buffered and not self._awaited(rank, head.peer):
                return False
            self.left.setdefault((rank, head.peer), deque()).append(head.buffer.clone())
        else:
            waiting = self.left.get((head.peer, rank))
            if not waiting:
                return False
            assert waiting[0].numel() == head.buffer.numel(), "both sides know the size"
            head.buffer.copy_(waiting.popleft())
        head.finished = True
        stream.popleft()
        return True

    def _awaited(self, rank: int, peer: int) -> bool:
        other = self.streams[peer]
        return bool(other) and not other[0].sends and other[0].peer == rank
