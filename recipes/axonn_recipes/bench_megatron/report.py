"""What is said of a run: a table, JSON, and time per step against ranks as in Figure 11 of paper 003."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from axonn_recipes.bench_megatron.measure import Run
from axonn_recipes.bench_megatron.settings import Settings
from axonn_recipes.megatron_gpt.settings import Settings as Training

MEGATRON, OURS = "Megatron", "AxoNN"
MIB = 2**20


@dataclass
class Side:
    """One side and what was measured of it.

    Attributes:
        system: `MEGATRON` or `OURS`.
        name: how it splits the ranks, and what is turned on.
        training: the run.
        seconds: a step's, by round: the median of that round's steps, each the slowest rank's.
        run: the last round's.
        sent: bytes that the rank which sends most sends in a step, by axis.
    """

    system: str
    name: str
    training: Training
    seconds: list[float] = field(default_factory=list)
    run: Run = field(default_factory=Run)
    sent: dict[str, float] = field(default_factory=dict)


def results(point: Settings, sides: list[Side], tried: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Everything measured at one point, as what JSON can hold; seconds and bytes.

    Args:
        point: what was measured.
        sides: the first is Megatron with nothing turned on.
        tried: seconds of every way that was tried, by system and name.
    """
    chosen = {system: best(sides, system) for system in (MEGATRON, OURS)}
    return {
        "settings": {**asdict(point), "ranks": point.ranks},
        "torch": torch.__version__,
        "sides": [
            {
                **{"system": side.system, "name": side.name, "seconds": side.seconds},
                **{"median": statistics.median(side.seconds), "sent": side.sent, "between": side.run.between},
            }
            for side in sides
        ],
        "best": {system: side.name for system, side in chosen.items()},
        "ratio": _ratio(chosen[MEGATRON], chosen[OURS]),
        "ratio_as_it_comes": _ratio(sides[0], chosen[OURS]),
        "tried": tried,
    }


def _ratio(megatron: Side, ours: Side) -> dict[str, Any]:
    rounds = [a / b for a, b in zip(megatron.seconds, ours.seconds, strict=True)]
    low, middle, high = statistics.quantiles(rounds, n=4, method="inclusive") if len(rounds) > 1 else rounds * 3
    return {"median": middle, "quartiles": [low, high], "range": [min(rounds), max(rounds)]}


def best(sides: list[Side], system: str) -> Side:
    """A system's fastest side."""
    return min((side for side in sides if side.system == system), key=lambda side: statistics.median(side.seconds))


def table(numbers: dict[str, Any]) -> str:
    """The sides of one point, what each sends along which axis, and the ratio."""
    named = [(f"{side['system']}, {side['name']}", side) for side in numbers["sides"]]
    width = max(len(name) for name, _ in named)
    lines = [f"{'':{width}} {'step s':>8} {'min-max':>13} {'MiB between':>12}  MiB that a rank sends, by axis"]
    for name, side in named:
        spread = f"{min(side['seconds']):.3f}-{max(side['seconds']):.3f}"
        sent = ", ".join(f"{axis} {value / MIB:.2f}" for axis, value in side["sent"].items())
        lines.append(f"{name:{width}} {side['median']:8.3f} {spread:>13} {side['between'] / MIB:12.1f}  {sent}")
    lines.append("")
    for what, ratio in (
        ("each at its best", numbers["ratio"]),
        ("Megatron with nothing turned on", numbers["ratio_as_it_comes"]),
    ):
        low, high = ratio["quartiles"]
        least, most = ratio["range"]
        lines.append(
            f"Megatron / AxoNN, {what}: {ratio['median']:.2f} (quartiles {low:.2f}-{high:.2f}, range {least:.2f}-{most:.2f})"
        )
    for system, tried in numbers["tried"].items():
        ordered = sorted(tried.items(), key=lambda pair: pair[1])
        lines.append(f"{system} tried, s: " + "; ".join(f"{name} {seconds:.3f}" for name, seconds in ordered))
    return "\n".join(lines)


def write(points: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Write results.json, table.txt and figure_11.png into a run's folder."""
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(points, indent=1) + "\n")
    (folder / "table.txt").write_text("\n\n".join(table(point) for point in points) + "\n")
    _draw(points, folder / "figure_11.png")
    return [folder / name for name in ("results.json", "table.txt", "figure_11.png")]


def _draw(points: list[dict[str, Any]], file: Path) -> None:
    """Time per step against ranks, a bar a system; above a pair, what is hidden size and ratio."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(3 + 1.6 * len(points), 4.2))
    for at, point in enumerate(points):
        medians = {side["name"]: side["median"] for side in point["sides"]}
        for offset, (system, color) in enumerate(((MEGATRON, "tab:orange"), (OURS, "tab:blue"))):
            side = next(each for each in point["sides"] if each["name"] == point["best"][system])
            middle = medians[side["name"]]
            spread = [[middle - min(side["seconds"])], [max(side["seconds"]) - middle]]
            axes.bar(at + 0.38 * offset - 0.19, middle, 0.36, color=color, label=system if at == 0 else None)
            axes.errorbar(at + 0.38 * offset - 0.19, middle, spread, color="black", capsize=3)
        highest = max(max(side["seconds"]) for side in point["sides"])
        axes.text(at, highest, f"{point['ratio']['median']:.2f}x", ha="center", va="bottom")
    labels = [f"{point['settings']['ranks']}\nhidden {point['settings']['hidden']}" for point in points]
    axes.set_xticks(range(len(points)), labels)
    axes.set_xlabel("ranks")
    axes.set_ylabel("time per step (s)")
    axes.margins(y=0.15)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
