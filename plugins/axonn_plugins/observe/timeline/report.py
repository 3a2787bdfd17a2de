"""A step's timeline in a run's folder: ``axonn timeline RUN`` prints it as a table and draws it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from axonn_plugins.config.base import ConfigError
from axonn_plugins.observe.figures import Picture
from axonn_plugins.observe.files import put

FILE = "timeline.json"
COLOURS = {
    "compute": "#5aae77",
    "adding up": "#9a78c8",
    "wire": "#4c8dd6",
    "waiting": "#d65c6c",
    "python": "#f0a04b",
    "idle": "#d0d0d0",
}


def write(kept: dict[str, Any], file: Path) -> None:
    """Keep what `axonn_plugins.observe.timeline.gather.bring_together` found."""
    file.parent.mkdir(parents=True, exist_ok=True)
    put(file, json.dumps(kept))


def read(run: Path) -> tuple[dict[str, Any], Path]:
    """The timeline of a run's folder, or of a file, and the file.

    Raises:
        ConfigError: there is none.
    """
    file = run / FILE if run.is_dir() else run
    try:
        kept = json.loads(file.read_text())
        assert "step" in kept
        table(kept)
        assert all(len(piece) == 4 for row in kept["ranks"] for piece in row["pieces"])
    except (
        OSError,
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ):
        raise ConfigError(
            f'"{run}" holds no {FILE}; start the training with AXONN_TIMELINE={run} set, and give that folder'
        ) from None
    return kept, file


def table(kept: dict[str, Any], explained: bool = True) -> str:
    """Milliseconds of each part by rank, their sum beside the step, and collectives by axis.

    Args:
        kept: the timeline.
        explained: say what each part is.
    """
    from axonn_plugins.observe.timeline.account import MEANING, PARTS

    lines = [f"step {kept['step']}, milliseconds"]
    lines.append(f"{'rank':<6}{'step':>10}{'sum':>10}" + "".join(f"{part:>11}" for part in PARTS))
    for row in kept["ranks"]:
        parts = row["parts_ms"]
        lines.append(
            f"{row['rank']:<6}{row['step_ms']:>10.2f}{sum(parts.values()):>10.2f}"
            + "".join(f"{parts[part]:>11.2f}" for part in PARTS)
        )
    means = {part: sum(row["parts_ms"][part] for row in kept["ranks"]) / len(kept["ranks"]) for part in PARTS}
    whole = sum(means.values())
    lines.append(f"{'mean':<6}{'':>10}{whole:>10.2f}" + "".join(f"{means[part]:>11.2f}" for part in PARTS))
    lines.append(f"{'':<26}" + "".join(f"{means[part] / whole:>11.1%}" for part in PARTS))
    if kept.get("unwatched_ms"):
        lines.append(f"a step without the watch takes {kept['unwatched_ms']:.2f}")
    if kept.get("clocks_ms"):
        lines.append(
            f"clocks of several machines: wire and waiting may be wrong by {kept['clocks_ms']:.2f} a collective"
        )
    lines += ["", *_by_axis(kept)]
    if explained:
        lines += ["", *(f"{part:<10} {said}" for part, said in MEANING.items())]
    return "\n".join(lines)


def _by_axis(kept: dict[str, Any]) -> list[str]:
    parts = ("adding up", "wire", "waiting")
    found: dict[str, dict[str, float]] = {}
    for row in kept["ranks"]:
        for axis, took in row["by_axis_ms"].items():
            total = found.setdefault(axis, dict.fromkeys(parts, 0.0))
            for part in parts:
                total[part] += took.get(part, 0.0) / len(kept["ranks"])
    width = max([4, *map(len, found)]) + 2
    lines = [f"{'axis':<{width}}" + "".join(f"{part:>11}" for part in parts) + "   in collectives, mean of the ranks"]
    return lines + [
        f"{axis:<{width}}" + "".join(f"{took[part]:>11.2f}" for part in parts) for axis, took in sorted(found.items())
    ]


def picture(kept: dict[str, Any]) -> Picture:
    """The step as a row for each rank, coloured by part."""
    rows = kept["ranks"]

    def draw(figure: Any) -> None:
        plot = figure.subplots()
        for place, row in enumerate(rows):
            for part, colour in COLOURS.items():
                bars = [
                    (row["began"] + began, ended - began) for began, ended, what, _ in row["pieces"] if what == part
                ]
                plot.broken_barh(bars, (place - 0.4, 0.8), color=colour, label=None if place else part)
        plot.set_yticks(range(len(rows)), [f"rank {row['rank']}" for row in rows])
        plot.invert_yaxis()
        plot.set_xlabel(f"ms from the start of step {kept['step']}")
        figure.legend(loc="outside upper center", ncols=len(COLOURS), frameon=False)

    return Picture(draw, (12, 1.4 + 0.4 * len(rows)), 150)
