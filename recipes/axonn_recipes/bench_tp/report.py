"""The report of a run: a table and a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from axonn_plugins.observe.figures import Picture
from axonn_recipes.bench.numbers import ratios, spread
from axonn_recipes.bench.output import extremes, mib, table, three
from axonn_recipes.bench_tp.measure import Side
from axonn_recipes.bench_tp.networks import NETWORKS
from axonn_recipes.bench_tp.settings import Settings


def results(settings: Settings, measured: list[Side], left_out: dict[str, str]) -> dict[str, Any]:
    """Everything measured, as what JSON can hold; seconds and bytes."""
    return {
        "settings": asdict(settings),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "left_out": left_out,
        "sides": [_numbers(side, settings) for side in measured],
        "comparisons": comparisons(measured),
    }


def _numbers(side: Side, settings: Settings) -> dict[str, Any]:
    found = spread(side.seconds)
    return {
        "name": side.name,
        "kind": side.kind,
        "losses": side.losses,
        "seconds": side.seconds,
        "median": side.median,
        "min": min(side.seconds),
        "max": max(side.seconds),
        "iqr": found["high"] - found["low"],
        f"{settings.trained.unit}_per_s": settings.samples / side.median,
        "memory_bytes": side.memory,
        "bytes_inside_nodes": side.inside,
        "bytes_between_nodes": side.between,
        "compute_s": side.compute,
        "exposed_communication_s": exposed(side),
    }


def brief(settings: Any, measured: list[Side]) -> dict[str, Any]:
    """The results of sides without a computation of their own, as JSON can hold them; seconds and bytes, None where not counted."""
    return {
        "torch": torch.__version__,
        "settings": asdict(settings),
        "sides": [
            {
                "name": side.name,
                "losses": side.losses,
                "seconds": side.seconds,
                "median": side.median,
                "memory_bytes": side.memory,
                "bytes_inside_nodes": side.inside,
                "bytes_between_nodes": side.between,
            }
            for side in measured
        ],
        "comparisons": comparisons(measured),
    }


def brief_text(numbers: dict[str, Any]) -> str:
    """The numbers of `brief` as text, of steps on a batch of token sequences."""
    tokens, sides = numbers["settings"]["batch"] * numbers["settings"]["context"], numbers["sides"]
    columns: dict[str, Callable[[Any], object]] = {
        "": lambda side: side["name"],
        "step s": lambda side: three(side["median"]),
        "min-max": lambda side: extremes(side["seconds"], three),
        "tokens/s": lambda side: f"{tokens / side['median']:,.0f}",
        "MiB a rank": lambda side: mib(side["memory_bytes"]),
    }
    if any(side["bytes_inside_nodes"] is not None for side in sides):
        columns["MiB inside"] = lambda side: mib(side["bytes_inside_nodes"])
        columns["MiB between"] = lambda side: mib(side["bytes_between_nodes"])
    return "\n".join([table(columns, sides), *compared_lines(numbers["comparisons"])])


def exposed(side: Side) -> float | None:
    """Seconds a step that communication adds, because nothing hides it; None where it was not measured.

    This is the one place that decides it: counters of the time blocked in collectives can be put here.
    """
    return None if side.compute is None else max(0.0, side.median - side.compute)


def comparisons(measured: list[Side]) -> list[dict[str, Any]]:
    """Each peer against our fastest grid that needs at most its memory, as time over our time, round by round."""
    found: list[dict[str, Any]] = []
    for peer in (side for side in measured if side.kind == "peer"):
        fitting = [side for side in measured if side.kind == "ours" and side.memory <= peer.memory]
        if not fitting:
            found.append({"peer": peer.name, "ours": None})
            continue
        best = min(fitting, key=lambda side: side.median)
        ratio = spread(ratios(peer.seconds, best.seconds))
        found.append({"peer": peer.name, "ours": best.name, "ratio": ratio.pop("median"), **ratio})
    return found


def against(numbers: dict[str, Any]) -> dict[str, float]:
    """Median of each comparison, by peer."""
    return {pair["peer"]: pair["ratio"] for pair in numbers["comparisons"] if pair["ours"] is not None}


def text(numbers: dict[str, Any]) -> str:
    """The report as text."""
    unit = NETWORKS[numbers["settings"]["network"]].unit
    shown = table(
        {
            "": lambda side: side["name"],
            "step s": lambda side: three(side["median"]),
            "min-max": lambda side: extremes(side["seconds"], three),
            f"{unit}/s": lambda side: f"{side[f'{unit}_per_s']:,.0f}",
            "MiB a rank": lambda side: mib(side["memory_bytes"]),
            "MiB inside": lambda side: mib(side["bytes_inside_nodes"]),
            "MiB between": lambda side: mib(side["bytes_between_nodes"]),
            "exposed s": lambda side: (
                "-" if side["exposed_communication_s"] is None else three(side["exposed_communication_s"])
            ),
        },
        numbers["sides"],
    )
    lines = compared_lines(numbers["comparisons"])
    lines += [f"{peer} left out: {reason}" for peer, reason in numbers["left_out"].items()]
    return "\n".join([shown, *lines])


def compared_lines(pairs: list[dict[str, Any]]) -> list[str]:
    """`comparisons` in words."""
    lines = ["", "each peer against our fastest side that needs at most its memory a rank (above 1: ours is faster)"]
    for pair in pairs:
        verdict = "no side of ours needs as little memory"
        if pair["ours"] is not None:
            verdict = (
                f"{pair['ratio']:.2f} times ours, {pair['ours']} (quartiles {pair['low']:.2f} to {pair['high']:.2f})"
            )
        lines.append(f"{pair['peer']}: {verdict}")
    return lines


def pictures(numbers: dict[str, Any]) -> dict[str, Picture]:
    """Bars of step times, split into compute and exposed communication; the stages apart, as in Figure 5.4."""
    stages = [side for side in numbers["sides"] if side["kind"] == "stage"]
    others = [side for side in numbers["sides"] if side["kind"] != "stage"]
    widths = [len(others), max(2, len(stages))]

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, 2, width_ratios=widths, sharey=True)
        for panel, sides, title in ((axes[0], others, "sides"), (axes[1], stages, "overlap, one after another")):
            for at, side in enumerate(sides):
                _bar(panel, at, side)
            panel.set_xticks(range(len(sides)), [side["name"] for side in sides], rotation=60, ha="right")
            panel.set_title(title)
        axes[0].set_ylabel("seconds a step; hatched: exposed communication")

    return {"steps.png": Picture(draw, (4 + 0.7 * sum(widths), 5))}


def _bar(panel: Any, at: int, side: dict[str, Any]) -> None:
    color = "tab:gray" if side["kind"] == "peer" else "tab:blue"
    hidden = side["exposed_communication_s"] or 0.0
    panel.bar(at, side["median"] - hidden, color=color)
    panel.bar(at, hidden, bottom=side["median"] - hidden, color=color, alpha=0.4, hatch="//")
    reach = [[side["median"] - side["min"]], [side["max"] - side["median"]]]
    panel.errorbar(at, side["median"], reach, color="black", capsize=3)
