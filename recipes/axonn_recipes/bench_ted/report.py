"""What is said of a run: tables, JSON and a picture."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from axonn_recipes.bench_ted.blocking import KINDS
from axonn_recipes.bench_ted.measure import Side
from axonn_recipes.bench_ted.settings import Settings
from axonn_recipes.bench_ted.sides import BASELINE, CAC, DEEPSPEED, FUSED

MIB = 2**20
PICTURE, SCALING = "figure_7_5.png", "scaling.png"
REDUCED = ("all-reduce", "reduce-scatter")  # which a fused all-reduce becomes


def results(runs: list[tuple[Settings, list[Side]]]) -> dict[str, Any]:
    """Everything measured, as what JSON can hold; seconds and bytes."""
    return {
        "torch": torch.__version__,
        "runs": [
            {
                "settings": {**asdict(settings), "ranks": settings.ranks, "tokens": settings.tokens},
                "sides": [_numbers(side) for side in sides],
                "judged": judged(sides),
                "ratios": ratios(sides),
            }
            for settings, sides in runs
        ],
    }


def _numbers(side: Side) -> dict[str, Any]:
    parts = {kind: statistics.median(side.parts[kind]) for kind in KINDS}
    step = statistics.median(side.seconds)
    return {**asdict(side), "median": step, "parts_median": parts, "compute": max(0.0, step - sum(parts.values()))}


def ratios(sides: list[Side]) -> list[dict[str, Any]]:
    """Each other side's step over the fused one's, round by round."""
    *others, last = sides
    return [
        {"side": side.name, **_spread([a / b for a, b in zip(side.seconds, last.seconds, strict=True)])}
        for side in others
    ]


def judged(sides: list[Side]) -> list[dict[str, Any]]:
    """What is asked of TED with all on, with the bar; and what dropping and checkpointing alone do, as the paper has it.

    A share is of time saved, an all-reduce's with that of the reduce-scatter which some become; None where the baseline
    sends nothing.
    """
    by_name = {side.name: side for side in sides}
    base, ours = by_name[BASELINE], by_name[FUSED]
    found = [
        {"what": f"{kind} time saved, {side.name}", "bar": bar, **_saved(base, side, kinds)}
        for side in (by_name[CAC], ours)
        for kind, kinds, bar in (("all-to-all", ("all-to-all",), 0.6), ("all-reduce", REDUCED, 0.33))
    ]
    for peer, bar in ((BASELINE, 1.25), (DEEPSPEED, 1.1)):
        times = [a / b for a, b in zip(by_name[peer].seconds, ours.seconds, strict=True)]
        found.append({"what": f"{peer}'s step / {FUSED}'s", "bar": bar, **_spread(times)})
    return found


def _saved(base: Side, side: Side, kinds: tuple[str, ...]) -> dict[str, float | None]:
    before, after = (
        [sum(parts) for parts in zip(*(each.parts[kind] for kind in kinds), strict=True)] for each in (base, side)
    )
    if not all(before):
        return {"median": None, "low": None, "high": None}
    return _spread([1 - b / a for a, b in zip(before, after, strict=True)])


def _spread(values: list[float]) -> dict[str, float | None]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": middle, "low": low, "high": high}


def table(numbers: dict[str, Any]) -> str:
    """The tables to read: each run, and where there are several, all by ranks."""
    shown = [_run(run) for run in numbers["runs"]]
    if len(numbers["runs"]) > 1:
        shown.append(_scaling(numbers["runs"]))
    return "\n\n".join(shown)


def _run(run: dict[str, Any]) -> str:
    head = ("step ms", "min-max", "compute", *KINDS, "MiB", "stash MiB")
    lines = [f"{run['settings']['ranks']} ranks: ms a step", _row("", head)]
    for side in run["sides"]:
        spread = f"{min(side['seconds']) * 1e3:.0f}-{max(side['seconds']) * 1e3:.0f}"
        parts = [f"{seconds * 1e3:.0f}" for seconds in (side["compute"], *side["parts_median"].values())]
        memory = f"{side['memory'] / MIB:.1f}", f"{side['stashed'] / MIB:.1f}"
        lines.append(_row(side["name"], (f"{side['median'] * 1e3:.0f}", spread, *parts, *memory)))
    lines += ["", "calls and bytes that a rank sends a step, counted", _row("", KINDS, 20)]
    for side in run["sides"]:
        cells = [f"{side['calls'].get(kind, 0)}: {side['sent'].get(kind, 0):,}" for kind in KINDS]
        lines.append(_row(side["name"], cells, 20))
    lines.append("")
    for each in run["judged"]:
        if each["median"] is not None:
            verdict = "met" if each["median"] >= each["bar"] else "not met"
            number, low, high, bar = (_figure(each[key], each["bar"]) for key in ("median", "low", "high", "bar"))
            lines.append(f"{each['what']:36} {number} (quartiles {low} to {high}; asked: {bar}, {verdict})")
    return "\n".join(lines)


def _row(name: str, cells: Any, width: int = 16) -> str:
    return f"{name:13}" + "".join(f"{cell:>{width}}" for cell in cells)


def _figure(value: float, bar: float) -> str:
    return f"{value:.1%}" if bar < 1 else f"{value:.2f}"


def _scaling(runs: list[dict[str, Any]]) -> str:
    names = [side["name"] for side in runs[0]["sides"]]
    lines = [
        "step ms by ranks; tokens a second and rank beside it",
        _row("", [r["settings"]["ranks"] for r in runs], 20),
    ]
    for name in names:
        cells = []
        for run in runs:
            step = next(side["median"] for side in run["sides"] if side["name"] == name)
            rate = run["settings"]["tokens"] / step / run["settings"]["ranks"]
            cells.append(f"{step * 1e3:.0f}, {rate:,.0f}")
        lines.append(_row(name, cells, 20))
    for name in names[:-1]:
        cells = [next(f"{each['median']:.2f}" for each in run["ratios"] if each["side"] == name) for run in runs]
        lines.append(f"{name} / {names[-1]}: " + ", ".join(cells))
    return "\n".join(lines)


def write(numbers: dict[str, Any], folder: Path) -> list[Path]:
    """Write results.json, table.txt and the pictures into a run's folder."""
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(numbers, indent=1) + "\n")
    (folder / "table.txt").write_text(table(numbers) + "\n")
    _draw(numbers["runs"], folder / PICTURE)
    names = ["results.json", "table.txt", PICTURE]
    if len(numbers["runs"]) > 1:
        _draw_scaling(numbers["runs"], folder / SCALING)
        names.append(SCALING)
    return [folder / name for name in names]


def _draw(runs: list[dict[str, Any]], file: Path) -> None:
    """A step's parts, stacked, a bar for each side and a panel for each number of ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.5 + 4.5 * len(runs), 4.5), layout="constrained")
    panels = figure.subplots(1, len(runs), squeeze=False)[0]
    for panel, run in zip(panels, runs, strict=True):
        names = [side["name"] for side in run["sides"]]
        bottom = [0.0] * len(names)
        for part in ("compute", *KINDS):
            heights = [side["compute"] if part == "compute" else side["parts_median"][part] for side in run["sides"]]
            panel.bar(names, heights, bottom=bottom, label=part)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        panel.set_title(f"{run['settings']['ranks']} ranks")
        panel.tick_params(axis="x", rotation=30)
    panels[0].set_ylabel("seconds a step")
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(file, dpi=120)


def _draw_scaling(runs: list[dict[str, Any]], file: Path) -> None:
    """A step's time by ranks, a line for each side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    panel = figure.subplots()
    ranks = [run["settings"]["ranks"] for run in runs]
    for place, side in enumerate(runs[0]["sides"]):
        panel.plot(ranks, [run["sides"][place]["median"] for run in runs], marker="o", label=side["name"])
    panel.set_xscale("log", base=2)
    panel.set_xticks(ranks, [str(number) for number in ranks])
    panel.set_ylim(bottom=0)
    panel.set_xlabel("ranks")
    panel.set_ylabel("seconds a step")
    panel.legend()
    figure.savefig(file, dpi=120)
