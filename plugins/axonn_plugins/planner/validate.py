"""``axonn plan --validate``: published measurements beside what the model says of the same."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axonn_plugins.cli.options import read
from axonn_plugins.observe.figures import Picture
from axonn_plugins.planner.corpus import Measurement, load


@dataclass(frozen=True, kw_only=True)
class Options:
    """Published measurements of training beside what the model says of the same.

    Attributes:
        plot: a file for a picture of predicted against published seconds.
    """

    plot: Path | None = None


@dataclass(frozen=True)
class Compared:
    """A measurement, and seconds of a step, published and predicted; NaN where the model has no such configuration."""

    row: Measurement
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Share by which the prediction is too long."""
        return self.predicted / self.published - 1


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    parsed = read(Options, [one for one in arguments if one != "--validate"], "axonn plan --validate")
    compared = [compare(row) for row in load()]
    print(table(compared))
    if parsed.plot is not None:
        Picture(lambda figure: _draw(figure, compared)).save(parsed.plot, "--plot")
    return 0


def compare(row: Measurement) -> Compared:
    """Ask the model what was measured."""
    return Compared(row, row.seconds, row.predicted())


def table(compared: Sequence[Compared]) -> str:
    """Markdown: for each published table its source, its rows, and their errors."""
    parts = []
    for name in dict.fromkeys(one.row.table for one in compared):
        chosen = [one for one in compared if one.row.table == name]
        lines = [
            f"{name}: {chosen[0].row.source}. {chosen[0].row.assumed}\n",
            "| framework | model | machine | GPUs | published, s | predicted, s | error |",
            "|---|---|---|---|---|---|---|",
        ]
        for one in chosen:
            said = "none | " if math.isnan(one.predicted) else f"{one.predicted:.3g} | {one.error:+.0%}"
            asked = f"{one.row.framework} | {one.row.model} | {one.row.machine} | {one.row.gpus}"
            lines.append(f"| {asked} | {one.published:.3g} | {said} |")
        parts.append("\n".join([*lines, f"\n{_summary(chosen)}"]))
    return "\n\n".join(parts)


def _summary(compared: Sequence[Compared]) -> str:
    errors = [abs(one.error) for one in compared if not math.isnan(one.predicted)]
    if not errors:
        return "The model has none of these."
    return f"{len(errors)} rows: {statistics.mean(errors):.0%} off on average, {max(errors):.0%} at most."


def _draw(figure: Any, compared: Sequence[Compared]) -> None:
    axis = figure.subplots()
    known = [one for one in compared if not math.isnan(one.predicted)]
    for name in dict.fromkeys(one.row.table for one in known):
        chosen = [one for one in known if one.row.table == name]
        axis.plot([one.published for one in chosen], [one.predicted for one in chosen], "o", label=name)
    span = [min(one.published for one in known), max(one.published for one in known)]
    axis.plot(span, span, color="gray", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="published, s a step", ylabel="predicted, s a step")
    axis.legend(fontsize="small")
