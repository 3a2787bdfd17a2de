"""``axonn plan --validate``: published measurements beside what the model says of the same, fitted to and held out."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axonn_plugins.cli.options import read
from axonn_plugins.observe.figures import Picture
from axonn_plugins.observe.files import put
from axonn_plugins.observe.progress import each
from axonn_plugins.planner import calibration, files
from axonn_plugins.planner.corpus import Measurement, load
from axonn_plugins.planner.fit import fit, held_out, systems
from axonn_plugins.planner.transformer import Mode
from axonn_plugins.planner.uncertainty import calibrated_range


@dataclass(frozen=True, kw_only=True)
class Options:
    """Published measurements of training beside what the model says of the same.

    Attributes:
        plot: a file for a picture of predicted against published seconds.
        mode: calibrated: the coefficients of calibration.toml; roofline: 004's assumptions.
        fit: fit the coefficients anew, which takes minutes, and write them to this file.
    """

    plot: Path | None = None
    mode: Mode = "calibrated"
    fit: Path | None = None


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

    @property
    def inside(self) -> bool:
        """True if the published seconds lie in the calibrated model's range."""
        span = calibrated_range(self.predicted)
        return span.low <= self.published <= span.high


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    parsed = read(Options, [one for one in arguments if one != "--validate"], "axonn plan --validate")
    rows = load()
    if parsed.fit is not None:
        files.writable("fit", str(parsed.fit))
        found = fit(rows, calibration.ours(), print)
        put(parsed.fit, calibration.written(found))
    compared = [compare(row, parsed.mode) for row in each(rows, "predicting", "row")]
    print("\n\n".join([table(compared), by_system(compared), verdict(compared)]))
    if parsed.plot is not None:
        Picture(lambda figure: _draw(figure, compared)).save(parsed.plot, "--plot")
    return 0


def compare(row: Measurement, mode: Mode = "calibrated") -> Compared:
    """Ask the model what was measured."""
    plan = row.predicted(mode)
    return Compared(row, row.seconds, math.nan if plan is None else plan.seconds)


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


def by_system(compared: Sequence[Compared]) -> str:
    """Markdown: the errors of each system, and to which half it belongs."""
    apart = set(systems([one.row for one in compared])[1::2])
    lines = ["| framework | machine | rows | mean error | largest | |", "|---|---|---|---|---|---|"]
    for system in systems([one.row for one in compared]):
        errors = _errors([one for one in compared if one.row.system == system])
        half = "held out" if system in apart else "fitted"
        if errors:
            means = f"{statistics.mean(errors):.0%} | {max(errors):.0%}"
            lines.append(f"| {' | '.join(system)} | {len(errors)} | {means} | {half} |")
    return "\n".join(lines)


def verdict(compared: Sequence[Compared]) -> str:
    """Errors of both halves, how many published seconds lie in the ranges, and whether frameworks come in the right order."""
    apart = {id(row) for row in held_out([one.row for one in compared])}
    halves = {
        "Fitted": [one for one in compared if id(one.row) not in apart],
        "Held out": [one for one in compared if id(one.row) in apart],
    }
    lines = [
        f"{name}: {_summary(half)} {_share([one.inside for one in half if _known(one)])} lie in the range."
        for name, half in halves.items()
    ]
    right = order(compared)
    return "\n".join(
        [*lines, f"Of {len(right)} pairs of frameworks on one model, {_share(right)} come in the right order."]
    )


def order(compared: Sequence[Compared]) -> list[bool]:
    """For each pair of frameworks on the same GPUs with the same model and batch, true if the faster one is predicted to be."""
    alike = lambda one: (one.row.table, one.row.model, one.row.machine, one.row.gpus, one.row.batch)  # noqa: E731
    right = []
    for _, group in itertools.groupby(sorted(compared, key=alike), key=alike):
        for first, second in itertools.combinations(group, 2):
            if first.row.framework != second.row.framework and first.published != second.published:
                right.append((first.published < second.published) == (first.predicted < second.predicted))
    return right


def _share(marks: Sequence[bool]) -> str:
    return f"{sum(marks)} ({sum(marks) / len(marks):.0%})" if marks else "none"


def _known(one: Compared) -> bool:
    return not math.isnan(one.predicted)


def _errors(compared: Sequence[Compared]) -> list[float]:
    return [abs(one.error) for one in compared if _known(one)]


def _summary(compared: Sequence[Compared]) -> str:
    errors = _errors(compared)
    if not errors:
        return "The model has none of these."
    return f"{len(errors)} rows: {statistics.mean(errors):.0%} off on average, {max(errors):.0%} at most."


def _draw(figure: Any, compared: Sequence[Compared]) -> None:
    axis = figure.subplots()
    known = [one for one in compared if _known(one)]
    for name in dict.fromkeys(one.row.table for one in known):
        chosen = [one for one in known if one.row.table == name]
        axis.plot([one.published for one in chosen], [one.predicted for one in chosen], "o", label=name)
    span = [min(one.published for one in known), max(one.published for one in known)]
    axis.plot(span, span, color="gray", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="published, s a step", ylabel="predicted, s a step")
    axis.legend(fontsize="small")
