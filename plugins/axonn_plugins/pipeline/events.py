"""Events of a stage in a batch with their times, for timelines and for the split of a batch's time."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Kind = Literal["forward", "backward", "wait", "transit", "send", "tied", "reduce", "optimizer", "loss"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Event(NamedTuple):
    """One thing that a stage did without a break.

    Attributes:
        kind: forward, backward: computation of a microbatch. wait: for a message that its sender has not sent, nothing else to do.
            transit: for one that is under way. send: packing and starting a message. tied, reduce: gradients of tied weights over
            stages, and of all over the data-parallel ranks. optimizer: the step. loss: its average over the ranks.
        microbatch: counted from 0 in its batch; -1 where it is no microbatch's.
        start: seconds of `time.perf_counter`, a clock that processes of one Linux machine share.
        end: the same.
    """

    kind: Kind
    microbatch: int
    start: float
    end: float


class Recorder:
    """Keeps the events of one batch.

    Attributes:
        events: of the batch that runs, or ran last, in the order of their ends.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, kind: Kind, microbatch: int, start: float) -> float:
        """Note what began at `start` and ends now; returns now."""
        now = perf_counter()
        self.events.append(Event(kind, microbatch, start, now))
        return now

    def add_wait(self, start: float, sent: float) -> None:
        """Note a wait that began at `start` and ends now, for a message that was sent at `sent`, which may be inf: not known."""
        now = perf_counter()
        cut = min(max(start, sent), now)
        self.events += waits(-1, start, cut, now)

    def clear(self) -> None:
        """A batch begins."""
        self.events = []


def waits(microbatch: int, start: float, sent: float, end: float) -> list[Event]:
    """A wait that was over at `end`, before and after the message that ended it was sent."""
    parts = (Event("wait", microbatch, start, sent), Event("transit", microbatch, sent, end))
    return [part for part in parts if part.end > part.start]


def to_tensor(events: Sequence[Event]) -> Tensor:
    """Events as numbers, for a collective.

    Returns:
        (events × 4), float64: place of the kind in `KINDS`, microbatch, start, end.
    """
    rows = [(KINDS.index(event.kind), *event[1:]) for event in events]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)


def from_tensor(rows: Tensor) -> list[Event]:
    """The inverse of `to_tensor`."""
    return [Event(KINDS[int(kind)], int(microbatch), start, end) for kind, microbatch, start, end in rows.tolist()]
