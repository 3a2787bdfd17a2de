"""What is said of a run: a table, CSV, JSON and pictures."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from axonn_plugins.pipeline.events import Event
from axonn_plugins.pipeline.timeline import draw, mean_split
from axonn_recipes.bench_pipeline.measure import Side
from axonn_recipes.bench_pipeline.overlap import Overlap, hidden
from axonn_recipes.bench_pipeline.settings import COMPUTE, LINKS, STEADY, UNEVEN, Settings
from axonn_recipes.bench_pipeline.sides import HALVES, OURS, SPLIT_BACKWARD, STOCK, TORCH

_BARS = {STEADY: 1.1, UNEVEN: 1.25, LINKS: 1.25, COMPUTE: None}
BEST_TORCH = "best of torch's schedules that do not split backward"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return {"median": middle, "low": low, "high": high}


def ratios(sides: Sequence[Side]) -> dict[str, dict[str, float]]:
    """How many times as long as ours each other side took, round by round; and the best of torch's."""
    by_name = {side.name: side for side in sides}
    ours = by_name.pop(OURS, None) or by_name.pop(next(iter(HALVES)))
    found = {
        name: spread([theirs / mine for theirs, mine in zip(side.seconds, ours.seconds, strict=True)])
        for name, side in by_name.items()
    }
    peers = [found[name] for name in TORCH if name in found and name not in SPLIT_BACKWARD]
    if peers:
        found[BEST_TORCH] = min(peers, key=lambda ratio: ratio["median"])
    return found


def results(runs: Sequence[tuple[Settings, list[Side]]]) -> dict[str, Any]:
    """Everything measured, as what JSON can hold."""
    return {
        "torch": torch.__version__,
        "runs": [
            {
                "settings": asdict(settings),
                "sides": [{**asdict(side), **spread(side.seconds)} for side in sides],
                "ratios": ratios(sides),
            }
            for settings, sides in runs
        ],
    }


def table(numbers: dict[str, Any]) -> str:
    """The runs to read."""
    return "\n\n".join(_run(run) for run in numbers["runs"])


def _run(run: dict[str, Any]) -> str:
    settings = run["settings"]
    what = f"{settings['ranks']} ranks, {settings['stages']} stages, {settings['microbatches']} microbatches"
    lines = [f"{what}: {settings['scenario']}", f"{'':26}{'batch ms':>10}{'quartiles':>16}{'times ours':>12}"]
    for side in run["sides"]:
        times = run["ratios"].get(side["name"], {}).get("median")
        lines.append(
            f"{side['name']:26}{1e3 * side['median']:10.0f}{_range(side, 1e3, 0):>16}{'' if times is None else f'{times:.2f}':>12}"
        )
    # Asked of one pipeline of four stages; a sweep has its ratios in the table.
    asked = settings["ranks"] == settings["stages"] == 4
    bars = {STOCK: _BARS[settings["scenario"]], BEST_TORCH: 1.0} if asked else {}
    for name, bar in bars.items():
        if bar is not None and name in run["ratios"]:
            ratio = run["ratios"][name]
            verdict = "met" if ratio["median"] >= bar else "not met"
            lines.append(f"{name} / {OURS}: {ratio['median']:.2f} ({_range(ratio, 1, 2)}; asked: {bar:g}, {verdict})")
    return "\n".join(lines)


def _range(found: dict[str, float], factor: float, digits: int) -> str:
    return f"{factor * found['low']:.{digits}f}-{factor * found['high']:.{digits}f}"


def write(numbers: dict[str, Any], figure: str, folder: Path) -> list[Path]:
    """Write JSON, CSV, the table and the picture into a run's folder."""
    folder.mkdir(parents=True)
    made = [folder / name for name in ("results.json", "table.txt", f"{figure}.csv", f"{figure}.png")]
    made[0].write_text(json.dumps(numbers, indent=1) + "\n")
    made[1].write_text(table(numbers) + "\n")
    with made[2].open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("ranks", "stages", "microbatches", "scenario", "side", "round", "seconds"))
        for run in numbers["runs"]:
            where = [run["settings"][key] for key in ("ranks", "stages", "microbatches", "scenario")]
            for side in run["sides"]:
                rows.writerows((*where, side["name"], *pair) for pair in enumerate(side["seconds"]))
    _bars(numbers["runs"], figure, made[3])
    return made


def _bars(runs: list[dict[str, Any]], figure: str, file: Path) -> None:
    from matplotlib.figure import Figure

    picture = Figure(figsize=(10, 4.5), layout="constrained")
    axes = picture.subplots()
    names = [side["name"] for side in runs[0]["sides"]]
    width = 0.8 / len(names)
    labels = {
        "schedules": lambda s: s["scenario"],
        "scaling": lambda s: f"{s['ranks']} ranks",
    }.get(figure, lambda s: f"G_inter {s['stages']}")
    for number, name in enumerate(names):
        sides = [side for run in runs for side in run["sides"] if side["name"] == name]
        places = [place + width * (number - (len(names) - 1) / 2) for place in range(len(sides))]
        heights = [side["median"] for side in sides]
        errors = [[side["median"] - side["low"] for side in sides], [side["high"] - side["median"] for side in sides]]
        axes.bar(places, heights, 0.92 * width, yerr=errors, label=name)
    axes.set_xticks(range(len(runs)), [labels(run["settings"]) for run in runs])
    axes.set_ylabel("seconds a batch")
    axes.set_ylim(bottom=0)
    picture.legend(loc="outside right upper", fontsize=8)
    picture.savefig(file, dpi=120)


def write_timeline(stages: list[list[Event]], folder: Path) -> Path:
    """Draw a batch of ours as Figure 4.3; beside it, as JSON, the split of its time."""
    draw(folder / "timeline.png", stages, "a message-driven batch")
    (folder / "split.json").write_text(json.dumps(mean_split(stages), indent=1) + "\n")
    return folder / "timeline.png"


def overlap_table(found: Sequence[Overlap]) -> str:
    """Both phases by coarsening factor, and the best."""
    lines = [f"{'coarsening':>10}{'all-reduce':>12}{'update':>10}{'in turn':>10}{'overlapped':>12}{'hidden':>9}   ms"]
    for one in found:
        times = [1e3 * statistics.median(values) for values in (one.reduce, one.update, one.after, one.together)]
        cells = f"{times[0]:12.0f}{times[1]:10.0f}{times[2]:10.0f}{times[3]:12.0f}"
        lines.append(f"{one.coarsening:10}{cells}{statistics.median(hidden(one)):9.0%}")
    best = min(found, key=lambda one: statistics.median(one.together))
    share = spread(hidden(best))
    verdict = "met" if share["median"] >= 0.7 else "not met"
    lines.append(
        f"best at {best.coarsening}: {share['median']:.0%} of the shorter phase is hidden (quartiles {share['low']:.0%} to {share['high']:.0%}; "
        f"asked: 70%, {verdict})"
    )
    return "\n".join(lines)


def write_overlap(settings: Settings, found: Sequence[Overlap], folder: Path) -> list[Path]:
    """Write JSON, CSV, the table and Figure 3.6."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True)
    made = [folder / name for name in ("results.json", "table.txt", "coarsening.csv", "coarsening.png")]
    numbers = {"settings": asdict(settings), "torch": torch.__version__, "factors": [asdict(one) for one in found]}
    made[0].write_text(json.dumps(numbers, indent=1) + "\n")
    made[1].write_text(overlap_table(found) + "\n")
    with made[2].open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("coarsening", "round", "reduce", "update", "after", "together"))
        for one in found:
            each = zip(one.reduce, one.update, one.after, one.together, strict=True)
            rows.writerows((one.coarsening, number, *times) for number, times in enumerate(each))
    picture = Figure(figsize=(6, 4), layout="constrained")
    axes = picture.subplots()
    factors = [one.coarsening for one in found]
    for name in ("together", "after", "reduce", "update"):
        axes.plot(factors, [statistics.median(getattr(one, name)) for one in found], "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(factors, [str(factor) for factor in factors])
    axes.set_xlabel("coarsening factor k")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    axes.legend()
    picture.savefig(made[3], dpi=120)
    return made
