"""``axonn report``: a run's folder as one HTML page."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_plugins.cli.options import OfRun, read
from axonn_plugins.observe.run_report import write_report


@dataclass(frozen=True)
class Options(OfRun):
    """A page of a run, report.html in its folder: loss, throughput, memory, exposed communication, ledger, settings; it loads nothing."""


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    print(write_report(read(Options, arguments, "axonn report").run))
    return 0
