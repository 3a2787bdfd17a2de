"""A pipeline without processes: the same machines, driven by given times of passes and links."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from axonn_plugins.pipeline.events import Event, waits
from axonn_plugins.pipeline.schedule import Action, Policy, Stage

PassTime = Callable[[int, Action], float]
LinkTime = Callable[[int, int, int], float]


@dataclass(frozen=True)
class Simulated:
    """A batch that was simulated.

    Attributes:
        events: forward, backward, wait and transit, by stage.
        seconds: from the start to the end of the last pass.
        alive: most activations that were kept at a time, by stage.
    """

    events: list[list[Event]]
    seconds: float
    alive: list[int]


def simulate(
    policy: Policy,
    stages: int,
    microbatches: int,
    seconds: PassTime,
    link: LinkTime = lambda source, target, microbatch: 0.0,
    limit: int | None = None,
) -> Simulated:
    """Run one batch.

    Args:
        policy: of `Stage`.
        stages: G_inter.
        microbatches: of the batch.
        seconds: how long a pass of a stage takes.
        link: how long a message from one stage to another is on its way; it may not overtake an earlier one.
        limit: ``pipeline_limit``.

    Raises:
        RuntimeError: no stage can go on.
    """
    return _Run(policy, stages, microbatches, seconds, link, limit).run()


class _Run:
    def __init__(
        self,
        policy: Policy,
        stages: int,
        microbatches: int,
        seconds: PassTime,
        link: LinkTime,
        limit: int | None,
    ) -> None:
        self.stages = [Stage(policy, i, stages, microbatches, limit) for i in range(stages)]
        self.seconds, self.link = seconds, link
        self.events: list[list[Event]] = [[] for _ in range(stages)]
        self.alive = [0] * stages
        self.free_since = [0.0] * stages
        self.busy = [False] * stages
        self.last_arrival: dict[tuple[int, int], float] = {}
        self.sent: dict[tuple[int, Action], float] = {}
        # Time, a number that keeps messages in order, stage, and what happens there.
        self.queue: list[tuple[float, int, int, str, int]] = []
        self.number = 0

    def run(self) -> Simulated:
        for i in range(len(self.stages)):
            self._start(i, 0.0)
        while self.queue:
            now, _, i, what, microbatch = heapq.heappop(self.queue)
            if what == "input":
                self.stages[i].input_arrived(microbatch)
            elif what == "gradient":
                self.stages[i].gradient_arrived(microbatch)
            else:
                self.busy[i], self.free_since[i] = False, now
                self._send(i, what, microbatch, now)
            self._start(i, now)
        if not all(stage.finished for stage in self.stages):
            raise RuntimeError("deadlock: no message is on its way and not every stage has finished")
        return Simulated(self.events, max(self.free_since), self.alive)

    def _later(self, when: float, i: int, what: str, microbatch: int) -> None:
        self.number += 1
        heapq.heappush(self.queue, (when, self.number, i, what, microbatch))

    def _start(self, i: int, now: float) -> None:
        if self.busy[i] or (action := self.stages[i].next()) is None:
            return
        if now > self.free_since[i]:
            sent = max(self.free_since[i], self.sent[i, action])
            self.events[i] += waits(action.microbatch, self.free_since[i], sent, now)
        end = now + self.seconds(i, action)
        self.events[i].append(Event(action.kind, action.microbatch, now, end))
        self.alive[i] = max(self.alive[i], self.stages[i].alive + (action.kind == "backward"))
        self.busy[i] = True
        self._later(end, i, action.kind, action.microbatch)

    def _send(self, i: int, kind: str, microbatch: int, now: float) -> None:
        target = i + 1 if kind == "forward" else i - 1
        self.sent[target, Action(kind, microbatch)] = now  # type: ignore[arg-type]
        if not 0 <= target < len(self.stages):
            return
        arrival = max(now + self.link(i, target, microbatch), self.last_arrival.get((i, target), 0.0))
        self.last_arrival[i, target] = arrival
        self._later(arrival, target, "input" if kind == "forward" else "gradient", microbatch)
