"""What is said of a run: a table, JSON and a picture."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from axonn_recipes.bench_tp.measure import Side
from axonn_recipes.bench_tp.settings import Settings

MIB = 2**20


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
    low, _, high = _quartiles(side.seconds)
    return {
        "name": side.name,
        "kind": side.kind,
        "losses": side.losses,
        "seconds": side.seconds,
        "median": side.median,
        "min": min(side.seconds),
        "max": max(side.seconds),
        "iqr": high - low,
        "tokens_per_s": settings.tokens / side.median,
        "memory_bytes": side.memory,
        "bytes_inside_nodes": side.inside,
        "bytes_between_nodes": side.between,
        "compute_s": side.compute,
        "exposed_communication_s": exposed(side),
    }


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
        ratios = [theirs / own for theirs, own in zip(peer.seconds, best.seconds, strict=True)]
        low, middle, high = _quartiles(ratios)
        found.append({"peer": peer.name, "ours": best.name, "ratio": middle, "low": low, "high": high})
    return found


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def table(numbers: dict[str, Any]) -> str:
    """The table to read."""
    sides = numbers["sides"]
    width = max(len(side["name"]) for side in sides)
    head = ("step s", "min-max", "tokens/s", "MiB a rank", "MiB inside", "MiB between", "exposed s")
    lines = [f"{'':{width}}  " + "  ".join(f"{title:>13}" for title in head)]
    for side in sides:
        cells = (
            f"{side['median']:.3f}",
            f"{side['min']:.3f}-{side['max']:.3f}",
            f"{side['tokens_per_s']:,.0f}",
            *(_shown(side[key], MIB, 1) for key in ("memory_bytes", "bytes_inside_nodes", "bytes_between_nodes")),
            _shown(side["exposed_communication_s"], 1, 3),
        )
        lines.append(f"{side['name']:{width}}  " + "  ".join(f"{cell:>13}" for cell in cells))
    lines += ["", "each peer against our fastest grid that needs at most its memory a rank (above 1: ours is faster)"]
    for pair in numbers["comparisons"]:
        verdict = "no grid of ours needs as little memory"
        if pair["ours"] is not None:
            verdict = (
                f"{pair['ratio']:.2f} times ours, {pair['ours']} (quartiles {pair['low']:.2f} to {pair['high']:.2f})"
            )
        lines.append(f"{pair['peer']:{width}}  {verdict}")
    lines += [f"{peer:{width}}  left out: {reason}" for peer, reason in numbers["left_out"].items()]
    return "\n".join(lines)


def _shown(value: float | None, unit: float, digits: int) -> str:
    return "-" if value is None else f"{value / unit:,.{digits}f}"


def write(numbers: dict[str, Any], folder: Path) -> list[Path]:
    """Write results.json, table.txt and steps.png into a run's folder."""
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(numbers, indent=2) + "\n")
    (folder / "table.txt").write_text(table(numbers) + "\n")
    _draw(numbers, folder / "steps.png")
    return [folder / name for name in ("results.json", "table.txt", "steps.png")]


def _draw(numbers: dict[str, Any], file: Path) -> None:
    """Bars of step times, split into compute and exposed communication; the stages apart, as in Figure 5.4."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    stages = [side for side in numbers["sides"] if side["kind"] == "stage"]
    others = [side for side in numbers["sides"] if side["kind"] != "stage"]
    widths = [len(others), max(2, len(stages))]
    figure, axes = pyplot.subplots(1, 2, figsize=(4 + 0.7 * sum(widths), 5), width_ratios=widths, sharey=True)
    for panel, sides, title in ((axes[0], others, "sides"), (axes[1], stages, "overlap, one after another")):
        for at, side in enumerate(sides):
            color = "tab:gray" if side["kind"] == "peer" else "tab:blue"
            hidden = side["exposed_communication_s"] or 0.0
            panel.bar(at, side["median"] - hidden, color=color)
            panel.bar(at, hidden, bottom=side["median"] - hidden, color=color, alpha=0.4, hatch="//")
            spread = [[side["median"] - side["min"]], [side["max"] - side["median"]]]
            panel.errorbar(at, side["median"], spread, color="black", capsize=3)
        panel.set_xticks(range(len(sides)), [side["name"] for side in sides], rotation=60, ha="right")
        panel.set_title(title)
    axes[0].set_ylabel("seconds a step; hatched: exposed communication")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
