"""``axonn ledger``: the collectives of a run's last watched step."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_plugins.cli.options import OfRun, read
from axonn_plugins.observe.ledger_report import picture, read_ledger, table


@dataclass(frozen=True)
class Options(OfRun):
    """The collectives of a run's last watched step as a table, and beside it as a timeline."""


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    run = read(Options, arguments, "axonn ledger").run
    kept = read_ledger(run)
    print(table(kept))
    for file in picture(kept).save(run / "ledger.png"):
        print(f"timeline: {file}")
    for trace in sorted(run.glob("trace-rank*.json")):
        print(f"Chrome trace: {trace}; open it in ui.perfetto.dev")
    return 0
