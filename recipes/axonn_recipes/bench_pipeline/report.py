"""The report of a run: tables, CSV and pictures."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from axonn_plugins.observe.figures import Picture
from axonn_plugins.observe.files import put
from axonn_plugins.pipeline.events import Event
from axonn_plugins.pipeline.timeline import draw, mean_split
from axonn_recipes.bench import output
from axonn_recipes.bench.numbers import ratios as in_rounds
from axonn_recipes.bench.numbers import spread
from axonn_recipes.bench.output import judged, ms, quartiles, table, two
from axonn_recipes.bench_pipeline.measure import Side
from axonn_recipes.bench_pipeline.overlap import Overlap, hidden
from axonn_recipes.bench_pipeline.settings import Settings
from axonn_recipes.bench_pipeline.sides import HALVES, OURS, SPLIT_BACKWARD, STOCK, TORCH

BEST_TORCH = "best of torch's schedules that do not split backward"


def ratios(sides: Sequence[Side]) -> dict[str, dict[str, float]]:
    """Time of each other side over ours, round by round; and of the best of torch's."""
    by_name = {side.name: side for side in sides}
    ours = by_name.pop(OURS, None) or by_name.pop(next(iter(HALVES)))
    found = {name: spread(in_rounds(side.seconds, ours.seconds)) for name, side in by_name.items()}
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


def text(numbers: dict[str, Any]) -> str:
    """The runs to read."""
    return "\n\n".join(_run(run) for run in numbers["runs"])


def _run(run: dict[str, Any]) -> str:
    settings, times = run["settings"], run["ratios"]
    shown = table(
        {
            "": lambda side: side["name"],
            "batch ms": lambda side: ms(side["median"]),
            "quartiles": quartiles,
            "times ours": lambda side: two(times[side["name"]]["median"]) if side["name"] in times else "",
        },
        run["sides"],
    )
    what = f"{settings['ranks']} ranks, {settings['stages']} stages, {settings['microbatches']} microbatches"
    lines = [f"{what}: {settings['scenario']}", shown]
    # Asked of one pipeline of four stages; a sweep has its ratios in the table.
    asked = settings["ranks"] == settings["stages"] == 4
    bars = {STOCK: 1.25, BEST_TORCH: 1.0} if asked else {}
    for name, bar in bars.items():
        if name in times:
            lines.append(f"{name} / {OURS}: {judged(times[name], bar)}")
    return "\n".join(lines)


def publish(numbers: dict[str, Any], figure: str, folder: Path, said: Sequence[str] = ()) -> list[Path]:
    """Print the tables and what is said of them, and write JSON, CSV and the picture into a run's folder."""
    rows: list[tuple[object, ...]] = [("ranks", "stages", "microbatches", "scenario", "side", "round", "seconds")]
    for run in numbers["runs"]:
        where = [run["settings"][key] for key in ("ranks", "stages", "microbatches", "scenario")]
        for side in run["sides"]:
            rows += [(*where, side["name"], *pair) for pair in enumerate(side["seconds"])]
    picture = Picture(partial(_bars, numbers["runs"], figure), (10, 4.5))
    written = output.publish(folder, numbers, "\n".join([text(numbers), *said]), {f"{figure}.png": picture})
    return [*written, _csv(folder / f"{figure}.csv", rows)]


def _csv(file: Path, rows: Iterable[Sequence[object]]) -> Path:
    with file.open("w", newline="") as opened:
        csv.writer(opened).writerows(rows)
    print(file)
    return file


def _bars(runs: list[dict[str, Any]], figure: str, picture: Any) -> None:
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


def write_timeline(stages: list[list[Event]], folder: Path) -> None:
    """Draw a batch of ours as Figure 4.3; beside it, as JSON, the split of its time."""
    put(folder / "split.json", json.dumps(mean_split(stages), indent=1) + "\n")
    print(folder / "split.json", *draw(folder / "timeline.png", stages, "a message-driven batch"), sep="\n")


def overlap_text(found: Sequence[Overlap]) -> str:
    """Both phases by coarsening factor, and the best."""
    times = {"all-reduce ms": "reduce", "update": "update", "in turn": "after", "overlapped": "together"}
    shown = table(
        {
            "coarsening": lambda one: one.coarsening,
            **{title: partial(_median, key) for title, key in times.items()},
            "hidden": lambda one: f"{statistics.median(hidden(one)):.0%}",
        },
        found,
    )
    best = min(found, key=lambda one: statistics.median(one.together))
    verdict = judged(spread(hidden(best)), 0.7, lambda share: f"{share:.0%}")
    return f"{shown}\nshare of the shorter phase that is hidden, best at {best.coarsening}: {verdict}"


def _median(phase: str, one: Overlap) -> str:
    return ms(statistics.median(getattr(one, phase)))


def publish_overlap(settings: Settings, found: Sequence[Overlap], folder: Path) -> None:
    """Print the table, and write JSON, CSV and Figure 3.6."""
    numbers = {"settings": asdict(settings), "torch": torch.__version__, "factors": [asdict(one) for one in found]}
    picture = Picture(partial(_curves, found), (6, 4))
    output.publish(folder, numbers, overlap_text(found), {"coarsening.png": picture})
    rows: list[tuple[object, ...]] = [("coarsening", "round", "reduce", "update", "after", "together")]
    for one in found:
        each = zip(one.reduce, one.update, one.after, one.together, strict=True)
        rows += [(one.coarsening, number, *times) for number, times in enumerate(each)]
    _csv(folder / "coarsening.csv", rows)


def _curves(found: Sequence[Overlap], figure: Any) -> None:
    axes = figure.subplots()
    factors = [one.coarsening for one in found]
    for name in ("together", "after", "reduce", "update"):
        axes.plot(factors, [statistics.median(getattr(one, name)) for one in found], "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(factors, [str(factor) for factor in factors])
    axes.set_xlabel("coarsening factor k")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    axes.legend()
