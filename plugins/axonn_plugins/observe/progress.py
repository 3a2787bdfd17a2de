"""Progress of what takes more than a moment and has a known length; only a terminal on stderr sees it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import TypeVar

from tqdm import tqdm

from axonn_plugins.observe.clock import DELAY, first

Kind = TypeVar("Kind")


class Bar(tqdm):
    """A bar without the thread that tqdm has beside its own: ranks are forked while one is shown."""

    monitor_interval = 0


def bar(total: int, what: str, unit: str) -> Bar:
    """A bar of the first rank, to `update`; it goes when it is closed.

    Args:
        total: of the units.
        what: is done.
        unit: in which it counts.
    """
    quiet = None if first() else True  # None: shown on a terminal only
    return Bar(total=total, desc=what, unit=unit, delay=DELAY, disable=quiet, leave=False, file=sys.stderr)


def each(things: Collection[Kind], what: str, unit: str) -> Iterator[Kind]:
    """Things one after the other, with a bar of how many are done."""
    with bar(len(things), what, unit) as shown:
        for thing in things:
            yield thing
            shown.update()


def say(text: str) -> None:
    """Tell who watches a terminal how far it is; a bar stays below."""
    if first() and sys.stderr.isatty():
        Bar.write(text, file=sys.stderr)
