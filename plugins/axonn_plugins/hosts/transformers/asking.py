"""Who asks how many processes there are: a loss that does counts them itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_asked = 0
_times = 1


def asked() -> int:
    """Number of times that somebody has asked for the number of processes."""
    return _asked


def ask() -> int:
    """Remember that somebody asks, and return by how much the number is to be multiplied, see `counting_times`."""
    global _asked
    _asked += 1
    return _times


@contextmanager
def counting_times(times: int) -> Iterator[None]:
    """Inside, there seem to be so many times as many processes."""
    global _times
    _times = times
    try:
        yield
    finally:
        _times = 1
