"""The results of an experiment: rows for a CSV file, a picture, and the published numbers as text."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from axonn_plugins.observe.figures import Picture
from axonn_plugins.planner.plot import of
from axonn_plugins.planner.report import GB, PARTS, shares
from axonn_plugins.planner.search import Plan


@dataclass(frozen=True)
class Check:
    """A statement of the papers' text, and what came out here."""

    published: str
    ours: str
    agrees: bool


@dataclass(frozen=True)
class Outcome:
    """An experiment's results.

    Attributes:
        rows: one dict for each, all with the same keys.
        picture: of them.
        checks: against what was published.
    """

    rows: list[dict[str, Any]]
    picture: Picture
    checks: list[Check] = field(default_factory=list)

    def write(self, stem: Path) -> list[Path]:
        """Write the CSV file and the picture; returns their paths."""
        table, picture = stem.with_suffix(".csv"), stem.with_suffix(".png")
        with table.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(self.rows[0]))
            writer.writeheader()
            writer.writerows(self.rows)
        return [table, *self.picture.save(picture)]


def of_plans(title: str, axis: str, labels: Sequence[str], plans: Sequence[Plan], checks: list[Check]) -> Outcome:
    """Plans beside one another, as in Figures 1 to 4 of 004."""
    rows = [{axis: label, **row(plan)} for label, plan in zip(labels, plans, strict=True)]
    return Outcome(rows, of(title, axis, labels, plans), checks)


def row(plan: Plan) -> dict[str, Any]:
    """A plan's sizes, seconds, shares of time in percent, and memory."""
    sizes = {name: getattr(plan, name) for name in ("n1", "n2", "np", "nd", "bm", "microbatches", "panels")}
    near = {name: getattr(plan, name) for name in ("v1", "v2", "vp", "vd")}
    percent = {f"{PARTS[part]} %": round(100 * share, 3) for part, share in shares(plan).items()}
    return {**sizes, **near, "seconds": plan.seconds, **percent, "GB": plan.bytes / GB}


def lines(
    title: str, x: str, y: str, series: Mapping[str, tuple[Sequence[Any], Sequence[Any]]], logarithmic: bool = True
) -> Picture:
    """A line for each series."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for name, (places, values) in series.items():
            axes.plot(places, values, "o-", label=name)
        axes.set_xscale("log", base=2)
        if logarithmic:
            axes.set_yscale("log")
        axes.set_title(title)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.legend(fontsize="small")

    return Picture(draw, (8, 5.5))


def heat(title: str, x: str, y: str, rows: list[dict[str, Any]], value: str) -> Picture:
    """A value over two keys of the rows."""

    def draw(figure: Any) -> None:
        across, up = sorted({one[x] for one in rows}), sorted({one[y] for one in rows})
        known = {(one[x], one[y]): one[value] for one in rows}
        axes = figure.subplots()
        image = axes.imshow(
            [[known[a, b] if known[a, b] is not None else float("nan") for a in across] for b in up], origin="lower"
        )
        axes.set_xticks(range(len(across)), [f"{one:g}" for one in across])
        axes.set_yticks(range(len(up)), [f"{one:g}" for one in up])
        axes.set_title(title)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        figure.colorbar(image, label=value)

    return Picture(draw, (8, 6))
