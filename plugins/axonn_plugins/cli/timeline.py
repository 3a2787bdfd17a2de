"""``axonn timeline``: where each millisecond of a step went, on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_plugins.cli.options import OfRun, read
from axonn_plugins.observe.timeline import report


@dataclass(frozen=True)
class Options(OfRun):
    """The step that a run with AXONN_TIMELINE set has watched, as a table and beside it as a picture."""


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    kept, file = report.read(read(Options, arguments, "axonn timeline").run)
    print(report.table(kept))
    for drawn in report.picture(kept).save(file.with_suffix(".png")):
        print(f"picture: {drawn}")
    return 0
