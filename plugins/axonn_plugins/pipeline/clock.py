"""When a message was sent, by the receiver's clock: a wait for one that is under way is not a wait for its sender."""

from __future__ import annotations

import math
from collections import deque
from time import perf_counter_ns

from axonn_plugins.pipeline.packing import UNKNOWN

_TIMED = 64


class Clock:
    """A neighbour's clock beside this one's, which need not agree: processes may be on two machines.

    A message seems to take its time and what this clock is ahead; one the other way, its time and what that one is ahead. Of
    the quickest of the latest both ways, which are taken to be equally quick, half the difference is what this clock is ahead.
    """

    def __init__(self) -> None:
        self._took: deque[int] = deque(maxlen=_TIMED)
        self.heard = UNKNOWN
        """Nanoseconds that the quickest message seemed to take, for the neighbour to know."""

    def arrived(self, sent: int, heard: int) -> float:
        """A message has arrived; returns when it was sent, in seconds of this clock; inf where that is not known yet.

        Args:
            sent: nanoseconds of the neighbour's clock.
            heard: the neighbour's.
        """
        self._took.append(perf_counter_ns() - sent)
        self.heard = min(self._took)
        return math.inf if heard == UNKNOWN else (sent + (self.heard - heard) / 2) / 1e9
