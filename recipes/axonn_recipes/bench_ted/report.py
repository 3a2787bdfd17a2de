"""The report of a run: tables and pictures."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from axonn_plugins.observe.figures import Picture
from axonn_recipes.bench.numbers import ratios as in_rounds
from axonn_recipes.bench.numbers import spread
from axonn_recipes.bench.output import extremes, judged, mib, table, two
from axonn_recipes.bench_ted.blocking import KINDS
from axonn_recipes.bench_ted.measure import Side
from axonn_recipes.bench_ted.settings import Settings
from axonn_recipes.bench_ted.sides import BASELINE, CAC, DEEPSPEED, FUSED, OVERLAP

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
                "judged": asked(sides),
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
    """Each other side's step over that of the side with all on, round by round."""
    *others, last = sides
    return [{"side": side.name, **spread(in_rounds(side.seconds, last.seconds))} for side in others]


def asked(sides: list[Side]) -> list[dict[str, Any]]:
    """The bars that TED with all on is held to; and the effect of dropping and checkpointing alone, as the paper has it.

    A share is of time saved, an all-reduce's with that of the reduce-scatter which some become; None where the baseline
    sends nothing.
    """
    by_name = {side.name: side for side in sides}
    base, ours = by_name[BASELINE], by_name[OVERLAP]
    found = [
        {"what": f"{kind} time saved, {side.name}", "bar": bar, **_saved(base, side, kinds)}
        for side in (by_name[CAC], by_name[FUSED])
        for kind, kinds, bar in (("all-to-all", ("all-to-all",), 0.6), ("all-reduce", REDUCED, 0.33))
    ]
    for peer, bar in ((BASELINE, 1.25), (DEEPSPEED, 1.25)):
        times = spread(in_rounds(by_name[peer].seconds, ours.seconds))
        found.append({"what": f"{peer}'s step / {OVERLAP}'s", "bar": bar, **times})
    return found


def _saved(base: Side, side: Side, kinds: tuple[str, ...]) -> dict[str, float | None]:
    before, after = (
        [sum(parts) for parts in zip(*(each.parts[kind] for kind in kinds), strict=True)] for each in (base, side)
    )
    if not all(before):
        return {"median": None, "low": None, "high": None}
    return spread([1 - share for share in in_rounds(after, before)])


def text(numbers: dict[str, Any]) -> str:
    """The tables to read: each run, and where there are several, all by ranks."""
    shown = [_run(run) for run in numbers["runs"]]
    if len(numbers["runs"]) > 1:
        shown.append(_scaling(numbers["runs"]))
    return "\n\n".join(shown)


def _run(run: dict[str, Any]) -> str:
    whole = lambda seconds: f"{seconds * 1e3:.0f}"  # noqa: E731
    times = table(
        {
            "": lambda side: side["name"],
            "step ms": lambda side: whole(side["median"]),
            "min-max": lambda side: extremes(side["seconds"], whole),
            "compute": lambda side: whole(side["compute"]),
            **{kind: partial(lambda kind, side: whole(side["parts_median"][kind]), kind) for kind in KINDS},
            "MiB": lambda side: mib(side["memory"]),
            "stash MiB": lambda side: mib(side["stashed"]),
        },
        run["sides"],
    )
    cell = lambda kind, side: f"{side['calls'].get(kind, 0)}: {side['sent'].get(kind, 0):,}"  # noqa: E731
    counted = table(
        {"": lambda side: side["name"], **{kind: partial(cell, kind) for kind in KINDS}},
        run["sides"],
    )
    bars = [
        f"{each['what']}: {judged(each, each['bar'], (lambda share: f'{share:.1%}') if each['bar'] < 1 else two)}"
        for each in run["judged"]
        if each["median"] is not None
    ]
    counts = ["", "calls and bytes that a rank sends a step, counted", counted, ""]
    return "\n".join([f"{run['settings']['ranks']} ranks: ms a step", times, *counts, *bars])


def _scaling(runs: list[dict[str, Any]]) -> str:
    names = [side["name"] for side in runs[0]["sides"]]

    def cell(run: dict[str, Any], place: int) -> str:
        step = run["sides"][place]["median"]
        rate = run["settings"]["tokens"] / step / run["settings"]["ranks"]
        return f"{step * 1e3:.0f}, {rate:,.0f}"

    shown = table(
        {
            "": lambda place: names[place],
            **{f"{run['settings']['ranks']} ranks": partial(cell, run) for run in runs},
        },
        range(len(names)),
    )
    lines = ["step ms by ranks; tokens a second and rank beside it", shown]
    for name in names[:-1]:
        found = [next(each["median"] for each in run["ratios"] if each["side"] == name) for run in runs]
        lines.append(f"{name} / {names[-1]}: " + ", ".join(two(times) for times in found))
    return "\n".join(lines)


def pictures(numbers: dict[str, Any]) -> dict[str, Picture]:
    """A step's parts, and where there are several numbers of ranks, its time by these."""
    runs = numbers["runs"]
    made = {PICTURE: Picture(partial(_draw, runs), (2.5 + 4.5 * len(runs), 4.5))}
    if len(runs) > 1:
        made[SCALING] = Picture(partial(_draw_scaling, runs), (6, 4.5))
    return made


def _draw(runs: list[dict[str, Any]], figure: Any) -> None:
    """A step's parts, stacked, a bar for each side and a panel for each number of ranks."""
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


def _draw_scaling(runs: list[dict[str, Any]], figure: Any) -> None:
    """A step's time by ranks, a line for each side."""
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
