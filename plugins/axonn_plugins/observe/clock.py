"""The seconds of what takes more than a moment and has no known length; only a terminal on stderr sees them."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DELAY = 2.0
"""Seconds before anything is shown."""
_EVERY = 0.5


def first() -> bool:
    """True on the rank that speaks for all, and where there are no ranks."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def elapsed(what: str, done: Callable[[], float] | None = None) -> Iterator[None]:
    """Show the seconds that the block takes. No process may be forked within: a thread looks at the clock.

    Args:
        what: is done.
        done: the share of it that is, by which the rest is guessed.
    """
    if not (first() and sys.stderr.isatty()):
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_tell, args=(what, done, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _tell(what: str, done: Callable[[], float] | None, over: threading.Event) -> None:
    began, shown = time.monotonic(), 0
    wait = DELAY
    while not over.wait(wait):
        seconds, wait = time.monotonic() - began, _EVERY
        line = f"{what}: {seconds:.0f} s{_left(seconds, 0.0 if done is None else done())}"
        sys.stderr.write(f"\r{line.ljust(shown)}")
        sys.stderr.flush()
        shown = len(line)
    if shown:
        sys.stderr.write(f"\r{' ' * shown}\r")
        sys.stderr.flush()


def _left(seconds: float, share: float) -> str:
    return f", {share:.0%} done, {seconds * (1 / share - 1):.0f} s left" if 0.01 < share <= 1 else ""
