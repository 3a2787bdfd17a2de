"""One step's collectives, kept in a run's folder: ``axonn ledger RUN`` prints them as a table and draws a timeline."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from axonn_plugins.config import ConfigError
from axonn_plugins.observe.figures import Picture
from axonn_plugins.observe.files import put
from axonn_plugins.observe.metrics import is_number

LEDGER_FILE = "ledger.json"
MIB = 2**20
_ROW = {"op": str, "axis": str, "ranks": int, "bytes": float, "started": float, "ended": float}


def write_ledger(entries: list[Any], step: int, run: Path) -> None:
    """Keep the entries of a `axonn_plugins.observe.ledger.Ledger`; replaces what an earlier step left."""
    rows = [
        {
            "op": entry.collective.op,
            "axis": entry.collective.axis,
            "ranks": entry.collective.size,
            "bytes": float(entry.sent),
            "started": entry.started,
            "ended": entry.ended,
            "exposed": entry.exposed,
        }
        for entry in entries
    ]
    put(run / LEDGER_FILE, json.dumps({"step": step, "collectives": rows}))


def read_ledger(run: Path) -> dict[str, Any]:
    """Read the ledger that `write_ledger` kept.

    Raises:
        ConfigError: the folder has none, or it is another thing.
    """
    file = run / LEDGER_FILE
    if not file.is_file():
        raise ConfigError(
            f'"{run}" holds no {LEDGER_FILE}; give the folder of a run on more than one rank, such as runs/quickstart'
        )
    try:
        kept = json.loads(file.read_text())
        if all(_is_row(row) for row in kept["collectives"]) and "step" in kept:
            return kept
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    raise ConfigError(f'"{file}" is no ledger of collectives; remove it, or give the folder of another run')


def _is_row(row: dict[str, Any]) -> bool:
    right = (isinstance(row[key], str) if kind is str else is_number(row[key]) for key, kind in _ROW.items())
    return all(right) and (row["exposed"] is None or is_number(row["exposed"]))


def table(kept: dict[str, Any]) -> str:
    """Calls, bytes and time by axis and operation, for one rank."""
    totals: dict[tuple[str, str, int], list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0, 0])
    for row in kept["collectives"]:
        total = totals[row["axis"], row["op"], row["ranks"]]
        total[0] += 1
        total[1] += row["bytes"]
        total[2] += row["ended"] - row["started"]
        if row["exposed"] is not None:
            total[3] += row["exposed"]
            total[4] += 1
    lines = [f"step {kept['step']}, rank 0", f"{'axis':<8}{'operation':<16}{'ranks':>5}{'calls':>7}{'MiB sent':>10}"]
    lines[1] += f"{'under way ms':>14}{'exposed ms':>12}"
    for (axis, op, ranks), (calls, sent, time, exposed, seen) in sorted(totals.items()):
        shown = f"{exposed * 1e3:.1f}" if seen else "-"
        lines.append(f"{axis:<8}{op:<16}{ranks:>5}{calls:>7.0f}{sent / MIB:>10.3f}{time * 1e3:>14.1f}{shown:>12}")
    return "\n".join(lines)


def picture(kept: dict[str, Any]) -> Picture:
    """The step as a timeline: a row for each axis; dark where this rank waited."""
    axes_of = sorted({row["axis"] for row in kept["collectives"]})

    def draw(figure: Any) -> None:
        plot = figure.subplots()
        for row in kept["collectives"]:
            place = axes_of.index(row["axis"])
            long, waited = row["ended"] - row["started"], row["exposed"] or 0.0
            plot.barh(place, long * 1e3, left=row["started"] * 1e3, color="tab:blue", alpha=0.4, height=0.7)
            plot.barh(place, waited * 1e3, left=(row["ended"] - waited) * 1e3, color="tab:red", height=0.7)
        plot.set_yticks(range(len(axes_of)), axes_of)
        plot.set_xlabel(f"ms from the start of step {kept['step']}; blue: under way, red: waited for")

    return Picture(draw, (10, 1 + 0.6 * len(axes_of)), 150)
