"""One direction of the link to a neighbouring stage: receives posted ahead, sends from a ring of buffers, and their threads."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from axonn_plugins.pipeline.clock import Clock
from axonn_plugins.pipeline.packing import FIRST_ROOM, Message, Packed, pack, sizes, times, unpack, words_of
from axonn_plugins.pipeline.wires import AHEAD, Pending, Wire

IDLE_SECONDS = 1.0
"""Seconds that a stage waits before it asks whether another rank was lost."""
_REMEMBERED = 8


class StageLost(RuntimeError):
    """A neighbour is gone, or has sent nothing in the time that the group allows.

    Attributes:
        stage: the neighbour.
        in_vain: it was waited for until the time was up, and may itself have waited; else the link to it is gone.
        agreed: all ranks name the same one in its words.
    """

    def __init__(self, stage: int, words: str, in_vain: bool = False, agreed: bool = False) -> None:
        super().__init__(stage, words, in_vain, agreed)
        self.stage, self.in_vain, self.agreed, self._words = stage, in_vain, agreed, words

    def __str__(self) -> str:
        return self._words


class Arrival(NamedTuple):
    """A message and where it is from.

    Attributes:
        is_input: from the stage before; else a gradient, from the stage after.
        sent: when its sender had packed it, by this process's `time.perf_counter`; inf where that is not known yet.
    """

    is_input: bool
    message: Message
    sent: float = math.inf


class Incoming:
    """Messages from one neighbour."""

    def __init__(self, wire: Wire, is_input: bool, stage: int, peer: int, clock: Clock) -> None:
        self.wire, self.is_input, self.stage, self.peer, self.clock = wire, is_input, stage, peer, clock
        self.channel = 0 if is_input else 2
        self.rooms = deque([FIRST_ROOM] * AHEAD)
        self.posted: deque[tuple[Pending, Tensor]] = deque()
        self.unposted = self.taken = 0
        self.slots = threading.Semaphore(0)

    def begin(self, messages: int, window: int) -> None:
        """Expect so many messages, of which `window` may wait unread."""
        self.unposted, self.taken, self.slots = messages, 0, threading.Semaphore(window)
        self.post()

    def post(self) -> None:
        """Post the receives that may be posted ahead."""
        while self.unposted and len(self.posted) < self.wire.ahead:
            self._post()

    def expect(self) -> None:
        """Post the next receive, unless one is posted: the stage has nothing else to do."""
        if self.unposted and not self.posted:
            self._post()

    def _post(self) -> None:
        buffer = torch.empty(self.rooms.popleft(), dtype=torch.uint8, device=self.wire.device)
        self.posted.append((self.wire.receive(buffer, self.peer, self.channel), buffer))
        self.unposted -= 1

    @property
    def due(self) -> bool:
        """True if messages are yet to come."""
        return bool(self.posted or self.unposted)

    def ready(self) -> bool:
        """True if the next message is here."""
        return bool(self.posted) and self.posted[0][0].done()

    def take(self) -> Arrival:
        """The next message, waited for."""
        pending, buffer = self.posted[0]
        pending.wait()
        self.posted.popleft()
        words = words_of(buffer)
        total, later = sizes(words)
        self.rooms.append(later)
        if total > buffer.numel():
            room = buffer.numel()
            whole = torch.empty(total, dtype=torch.uint8, device=self.wire.device)
            whole[:room] = buffer
            self.wire.receive(whole[room:], self.peer, self.channel + 1).wait()
            buffer = whole
        self.taken += 1
        return Arrival(self.is_input, unpack(buffer, words), self.clock.arrived(*times(words)))

    def lost(self, error: RuntimeError) -> StageLost:
        """The error to raise when the link fails."""
        what = "input" if self.is_input else "gradient"
        return StageLost(
            self.peer,
            f"stage {self.stage} waited for the {what} of microbatch {self.taken} from stage {self.peer}: {error}",
            in_vain(error),
        )


class Listener:
    """A thread that waits at one link, where a wire cannot be asked."""

    def __init__(self, link: Incoming, inbox: SimpleQueue[Arrival | StageLost]) -> None:
        self.link, self.inbox = link, inbox
        self.jobs: SimpleQueue[int | None] = SimpleQueue()
        threading.Thread(target=self._run, name=f"axonn-pipeline-{link.peer}", daemon=True).start()

    def _run(self) -> None:
        while (messages := self.jobs.get()) is not None:
            for _ in range(messages):
                self.link.slots.acquire()
                try:
                    self.inbox.put(self.link.take())
                    self.link.post()
                except RuntimeError as error:
                    self.inbox.put(self.link.lost(error))
                    return


class _Started:
    """A message that another thread starts to send."""

    def __init__(self, start: Callable[[], Pending]) -> None:
        self.start = start
        self.pending: Pending | None = None
        self.error: Exception | None = None
        # Made in a fifth of an Event's time.
        self.untried = threading.Lock()
        self.untried.acquire()

    def run(self) -> None:
        try:
            self.pending = self.start()
        except Exception as error:  # for whoever waits; the thread goes on
            self.error = error
        self.untried.release()

    def done(self) -> bool:
        return not self.untried.locked() and (self.pending is None or self.pending.done())

    def wait(self) -> None:
        with self.untried:
            pass
        if self.error is not None:
            raise self.error
        assert self.pending is not None
        self.pending.wait()


class Sender:
    """A thread that starts messages, where a wire takes them only as fast as the system does, so that a stage goes on computing."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[_Started | None] = SimpleQueue()
        threading.Thread(target=self._run, name="axonn-pipeline-sender", daemon=True).start()

    def send(self, start: Callable[[], Pending]) -> Pending:
        """Have the thread start a message; errors come when it is waited for."""
        started = _Started(start)
        self.jobs.put(started)
        return started

    def _run(self) -> None:
        while (started := self.jobs.get()) is not None:
            started.run()


class Waiter:
    """A thread that waits for sends, where a wire cannot be asked: one to a rank that was killed may never return.

    Args:
        on_idle: called about every second meanwhile; may raise.
    """

    def __init__(self, on_idle: Callable[[], None]) -> None:
        self.jobs: SimpleQueue[Pending | None] = SimpleQueue()
        self._waited: SimpleQueue[RuntimeError | None] = SimpleQueue()
        self._on_idle = on_idle
        threading.Thread(target=self._run, name="axonn-pipeline-waiter", daemon=True).start()

    def wait(self, pending: Pending) -> None:
        """Return when the message has left."""
        self.jobs.put(pending)
        while True:
            try:
                error = self._waited.get(timeout=IDLE_SECONDS)
            except Empty:
                self._on_idle()
                continue
            if error is not None:
                raise error
            return

    def _run(self) -> None:
        while (pending := self.jobs.get()) is not None:
            try:
                pending.wait()
            except RuntimeError as error:
                self._waited.put(error)
            else:
                self._waited.put(None)


class Outgoing:
    """Messages to one neighbour, from a ring of buffers: a send is waited for when its buffer's turn comes again."""

    def __init__(
        self, wire: Wire, is_input: bool, peer: int, clock: Clock, threads: tuple[Sender, Waiter] | None
    ) -> None:
        self.wire, self.peer, self.channel, self.clock = wire, peer, 0 if is_input else 2, clock
        self._start = (lambda start: start()) if threads is None else threads[0].send
        self._waited = (lambda pending: pending.wait()) if threads is None else threads[1].wait
        self.rooms = deque([FIRST_ROOM] * AHEAD)
        self.totals: deque[int] = deque(maxlen=_REMEMBERED)
        self.ring: deque[tuple[Packed, list[Pending], int]] = deque()
        self.window = 1

    def send(self, message: Message) -> None:
        """Start to send, when a buffer is free."""
        used = self._free() if len(self.ring) >= self.window else None
        room = self.rooms.popleft()
        packed = pack(message, room, max(self.totals, default=0), self.wire.device, used, self.clock.heard)
        self.rooms.append(packed.later)
        self.totals.append(packed.total)
        try:
            pending = [self._start(partial(self._put, packed.buffer, 0, room, self.channel))]
            if packed.total > room:
                pending.append(self._start(partial(self._put, packed.buffer, room, packed.total, self.channel + 1)))
        except RuntimeError as error:
            raise self._lost(message.microbatch, error) from None
        self.ring.append((packed, pending, message.microbatch))

    def _put(self, buffer: Tensor, begin: int, end: int, channel: int) -> Pending:
        return self.wire.send(buffer[begin:end], self.peer, channel)

    def flush(self) -> None:
        """Wait until all has left."""
        for _packed, pending, microbatch in self.ring:
            self._wait(pending, microbatch)

    def _free(self) -> Packed:
        packed, pending, microbatch = self.ring.popleft()
        self._wait(pending, microbatch)
        return packed

    def _wait(self, pending: list[Pending], microbatch: int) -> None:
        try:
            while pending:
                self._waited(pending.pop())
        except StageLost:
            raise
        except RuntimeError as error:
            raise self._lost(microbatch, error) from None

    def _lost(self, microbatch: int, error: RuntimeError) -> StageLost:
        words = f"microbatch {microbatch} could not be sent to stage {self.peer}: {error}"
        return StageLost(self.peer, words, in_vain(error))


def in_vain(error: RuntimeError) -> bool:
    """True if a link's error is that the time was up; libraries raise one class for both."""
    words = str(error).lower()
    return "timeout" in words or "timed out" in words
