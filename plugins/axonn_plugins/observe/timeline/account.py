"""The time of a step on one rank, divided among what took it; the parts are the step, to the nanosecond."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from axonn_plugins.observe.timeline.record import Call, Key, Recorder, Span

PARTS = ("compute", "adding up", "wire", "waiting", "python", "idle", "measuring")
MEANING = {
    "compute": "operators of torch that communicate nothing",
    "adding up": "sums over ranks: by torch where shares are exchanged, else what the backend's would take at torch's speed",
    "wire": "in collectives that all of their ranks had begun",
    "waiting": "in collectives that some of their ranks had not begun",
    "python": "between operators, with a processor: Python, autograd, torch's dispatcher, beginning collectives",
    "idle": "without a processor outside of collectives: others had it, or a disk or a data loader was waited for",
    "measuring": "the watch itself",
}


@dataclass
class Piece:
    """A while of the step.

    Attributes:
        began: nanoseconds of the clock.
        ended: likewise.
        part: one of `PARTS`.
        call: the collective that it was spent in.
    """

    began: int
    ended: int
    part: str
    call: Call | None = None


@dataclass
class Account:
    """The step of one rank.

    Attributes:
        nanoseconds: from its beginning to its end.
        parts: nanoseconds of each of `PARTS`; their sum is the step.
        by_axis: nanoseconds in collectives by axis, and by part.
        pieces: what was done when, in order and without gaps; measuring is part of Python there.
    """

    nanoseconds: int
    parts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    by_axis: dict[str, dict[str, int]] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)


def account(watch: Recorder, last: Mapping[Key, int], adding: Mapping[torch.dtype, float], watching: float) -> Account:
    """Say where a step's time went.

    Args:
        watch: of the step.
        last: when the last rank began each collective, on this rank's clock.
        adding: nanoseconds that adding up a byte takes, by type.
        watching: nanoseconds that the watch costs by operator.
    """
    found = Account(watch.ended[0] - watch.began[0])
    found.pieces = [piece for piece in _Division(watch, last, adding).pieces() if piece.ended > piece.began]
    for piece in found.pieces:
        took = piece.ended - piece.began
        found.parts[piece.part] += took
        if piece.call is not None:
            axis = found.by_axis.setdefault(piece.call.axis, {})
            axis[piece.part] = axis.get(piece.part, 0) + took
    measuring = min(found.parts["python"], int(watching * len(watch.spans)))
    found.parts["python"] -= measuring
    found.parts["measuring"] = measuring
    return found


class _Division:
    """The pieces of a step, made of the spans that its watch noted."""

    def __init__(self, watch: Recorder, last: Mapping[Key, int], adding: Mapping[torch.dtype, float]) -> None:
        self._watch, self._last = watch, last
        self._to_add = {id(call): int(call.added * adding.get(call.dtype, 0.0)) for call in watch.calls}
        seen = {id(span.call) for span in watch.spans if span.kind == "wait"}
        # Waits in C++, as those of DistributedDataParallel, are not seen: time without a processor then is theirs.
        self._unseen = [call for call in watch.calls if id(call) not in seen]
        self._one_thread = torch.get_num_threads() == 1

    def pieces(self) -> Iterator[Piece]:
        """All of the step."""
        at, worked = self._watch.began
        for span in self._watch.spans:
            span.began = max(at, span.began)
            yield from self._gap(at, span.began, span.worked[0] - worked)
            yield from self._span(span)
            at, worked = span.ended, span.worked[1]
        yield from self._gap(at, self._watch.ended[0], self._watch.ended[1] - worked)

    def _span(self, span: Span) -> Iterator[Piece]:
        ran = min(span.worked[1] - span.worked[0], span.ended - span.began)
        if span.kind == "wait":
            yield from self._waits(span.began, span.ended, span.call)
        elif span.kind == "call":
            yield Piece(span.began, span.began + ran, "python")
            yield from self._waits(span.began + ran, span.ended, span.call)
        else:
            part = "adding up" if span.kind == "adding" else "compute"
            # Of several threads one may wait for the others, which is computing.
            stopped = span.began + ran if self._one_thread else span.ended
            yield Piece(span.began, stopped, part)
            yield Piece(stopped, span.ended, "idle")

    def _gap(self, began: int, ended: int, worked: int) -> Iterator[Piece]:
        stopped = began + min(worked, ended - began)
        yield Piece(began, stopped, "python")
        waited = [call for call in self._unseen if call.began < ended]
        if not waited or stopped >= ended:
            yield Piece(stopped, ended, "idle")
            return
        self._unseen = [call for call in self._unseen if call.began >= ended]
        yield from self._waits(stopped, ended, waited[-1])

    def _waits(self, began: int, ended: int, call: Call | None) -> Iterator[Piece]:
        """A wait: for the last rank to begin, for the wire, and for the sum."""
        arrived = began if call is None else min(max(began, self._last.get(call.key, began)), ended)
        adding = 0 if call is None else min(ended - arrived, self._to_add.get(id(call), 0))
        if call is not None:
            self._to_add[id(call)] -= adding
        yield Piece(began, arrived, "waiting", call)
        yield Piece(arrived, ended - adding, "wire", call)
        yield Piece(ended - adding, ended, "adding up", call)
