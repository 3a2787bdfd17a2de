"""Messages between neighbouring stages: receives posted ahead, sends not waited for, whichever arrives first is worked on.

The receiver has made room for a message before it knows what it is: as much as the sender asked for in an earlier one. What
does not fit follows by itself. So a message whose shape is an earlier one's needs no word in advance, and a receive can be
posted while the stage before still computes, which on a link that hands over only to a receiver that waits saves a round trip.

Where a receive occupies the accelerator (NCCL) none is posted ahead: a kernel that is loaded for the first time, or memory that is
given back, waits for all that runs there. A stage that has nothing else to do posts those whose senders wait for nothing from it.
Sends occupy it until they are taken in, so in the first batch that trains, where kernels are loaded, one microbatch is under way at a time. Later
the first stage lets one whose shapes are new into an empty pipeline, and the next when it is back (`Stage`'s `apart`); its messages say so, and a stage
posts no receive for the next before it has sent the gradient. So wherever that one is computed nothing is sent or posted.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue

from axonn_plugins.pipeline.clock import Clock
from axonn_plugins.pipeline.links import IDLE_SECONDS, Arrival, Incoming, Listener, Outgoing, Sender, StageLost, Waiter
from axonn_plugins.pipeline.packing import Message
from axonn_plugins.pipeline.wires import Wire, wait_for


class Transport:
    """The links of one stage.

    Args:
        wire: carries bytes.
        stage: this one.
        stages: G_inter.
        on_idle: called about every second while a message is waited for, with the stages that any is due from; may raise.

    Attributes:
        occupies: whether messages occupy the accelerator.
    """

    def __init__(self, wire: Wire, stage: int, stages: int, on_idle: Callable[[list[int]], None] | None = None) -> None:
        self.stage, self._on_idle = stage, on_idle
        clocks = {stage - 1: Clock(), stage + 1: Clock()}
        self._incoming = {
            is_input: Incoming(wire, is_input, stage, peer := stage - 1 if is_input else stage + 1, clocks[peer])
            for is_input in (True, False)
            if 0 <= (stage - 1 if is_input else stage + 1) < stages
        }
        self._threads = None if wire.polls else (Sender(), Waiter(self._idle))
        self._outgoing = {
            is_input: Outgoing(
                wire, is_input, peer := stage + 1 if is_input else stage - 1, clocks[peer], self._threads
            )
            for is_input in (True, False)
            if 0 <= (stage + 1 if is_input else stage - 1) < stages
        }
        self._inbox: SimpleQueue[Arrival | StageLost] = SimpleQueue()
        self._listeners = {} if wire.polls else {k: Listener(v, self._inbox) for k, v in self._incoming.items()}
        self._polls, self._timeout = wire.polls, wire.timeout
        self._window, self._backward, self._sent = 0, True, {True: 0, False: 0}
        self._cold = self.occupies = wire.ahead == 0
        self._alone = False

    def limit(self, chosen: int) -> int:
        """Microbatches that may be under way in the next batch that trains, where so many are `chosen`; the same on all stages."""
        return 1 if self._cold else chosen

    def begin(self, microbatches: int, window: int, *, backward: bool = True) -> None:
        """A batch begins: post the first receives.

        Args:
            microbatches: messages due from each neighbour.
            window: messages that may wait here unread from a neighbour, and be unsent to one.
            backward: whether gradients will come.

        Raises:
            StageLost: a stage is gone.
        """
        self._window, self._backward, self._sent, self._alone = window, backward, {True: 0, False: 0}, False
        for outgoing in self._outgoing.values():
            outgoing.window = window
        for is_input, incoming in self._incoming.items():
            if is_input or backward:
                try:
                    incoming.begin(microbatches, window)
                except RuntimeError as error:
                    raise incoming.lost(error) from None
                if not self._polls:
                    self._listeners[is_input].jobs.put(microbatches)

    def send_input(self, message: Message) -> None:
        """Start to send an output to the stage after.

        Raises:
            StageLost: that stage is gone.
        """
        self._sent[True] += 1
        self._outgoing[True].send(message)

    def send_gradient(self, message: Message) -> None:
        """Start to send the gradient of an input to the stage before.

        Raises:
            StageLost: that stage is gone.
        """
        self._sent[False] += 1
        self._outgoing[False].send(message)

    def receive(self, wait: bool) -> Arrival | None:
        """The message that arrived first; None: none has, and `wait` is false.

        Raises:
            StageLost: a stage is gone.
        """
        found = self._poll(wait) if self._polls else self._hear(wait)
        if isinstance(found, StageLost):
            raise found
        return found

    def end(self) -> None:
        """The batch has ended: wait until what was sent has left.

        Raises:
            StageLost: a stage is gone.
        """
        for outgoing in self._outgoing.values():
            outgoing.flush()
        self._cold = self._cold and not self._backward

    def close(self) -> None:
        """End the threads that wait at links."""
        for listener in self._listeners.values():
            listener.jobs.put(None)
        for thread in self._threads or ():
            thread.jobs.put(None)

    def _idle(self) -> None:
        if self._on_idle is not None:
            self._on_idle([link.peer for link in self._incoming.values() if link.due])

    def _hear(self, wait: bool) -> Arrival | StageLost | None:
        while True:
            try:
                found = self._inbox.get(timeout=IDLE_SECONDS) if wait else self._inbox.get_nowait()
            except Empty:
                if not wait:
                    return None
                self._idle()
                continue
            if isinstance(found, Arrival):
                self._incoming[found.is_input].slots.release()
            return found

    def _poll(self, wait: bool) -> Arrival | None:
        found: list[Arrival] = []

        def arrived() -> bool:
            for incoming in self._incoming.values():
                try:
                    if incoming.ready():
                        found.append(incoming.take())
                        if incoming.is_input:
                            self._alone = found[0].message.alone
                        incoming.post()
                        return True
                except RuntimeError as error:
                    raise incoming.lost(error) from None
            return False

        if not arrived() and wait:
            try:
                for incoming in self._incoming.values():
                    if self._may_come(incoming):
                        incoming.expect()
                wait_for(arrived, self._timeout, self._idle)
            except StageLost:
                raise
            except RuntimeError as error:
                raise next(link for link in self._incoming.values() if link.due).lost(error) from None
        return found[0] if found else None

    def _may_come(self, incoming: Incoming) -> bool:
        """True if the next message of a link waits for nothing that this stage has yet to send."""
        if incoming.is_input:
            return not self._backward or incoming.taken < (1 if self._alone else self._window) + self._sent[False]
        return incoming.taken < self._sent[True]
