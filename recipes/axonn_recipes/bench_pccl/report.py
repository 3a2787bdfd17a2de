"""What is said of a run: a table, JSON and pictures."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from axonn_plugins.cluster.units import bits_per_second, nanoseconds
from axonn_recipes.bench_pccl.settings import Settings, shown

NATIVE, OURS = "gloo", "pccl"
HALVING = ("hierarchical_log_direct", "hierarchical_ring_direct")
"""The two sides of Figure 6.6."""


def bound(collective: str, size: int, nodes: int, latency: float, bandwidth: float) -> float | None:
    """The least seconds that physics allows between nodes: latency times steps, and bytes over a node's link.

    ceil(log2 nodes) steps, and each node's link carries all blocks but its own once; an all-reduce does both twice.
    None within one node.

    Args:
        collective: its name.
        size: bytes of all blocks.
        nodes: how many.
        latency: seconds from node to node.
        bandwidth: bytes per second of a node's link, in each direction.
    """
    if nodes == 1:
        return None
    once = latency * math.ceil(math.log2(nodes)) + size * (nodes - 1) / nodes / bandwidth
    return 2 * once if collective == "all_reduce" else once


def results(settings: Settings, cells: list[dict[str, Any]], left_out: dict[str, str]) -> dict[str, Any]:
    """Everything measured, as what JSON can hold; seconds and bytes."""
    return {
        "settings": asdict(settings),
        "torch": torch.__version__,
        "left_out": left_out,
        "cells": [cell | _numbers(cell, settings) for cell in cells],
    }


def _numbers(cell: dict[str, Any], settings: Settings) -> dict[str, Any]:
    low, median, high = quartiles(cell["seconds"])
    least = None
    if settings.emulated:
        latency, bits = nanoseconds(settings.latency) / 1e9, bits_per_second(settings.bandwidth)
        bandwidth = bits / 8 if bits else math.inf
        least = bound(cell["collective"], cell["bytes"], cell["nodes"], latency, bandwidth)
    return {"median": median, "low": low, "high": high, "bound": least}


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def by_place(numbers: dict[str, Any]) -> dict[tuple[str, int, int, int], dict[str, dict[str, Any]]]:
    """Cells by (collective, nodes, ranks a node, bytes), then by side."""
    found: dict[tuple[str, int, int, int], dict[str, dict[str, Any]]] = {}
    for cell in numbers["cells"]:
        place = cell["collective"], cell["nodes"], cell["ranks_per_node"], cell["bytes"]
        found.setdefault(place, {})[cell["side"]] = cell
    return found


def table(numbers: dict[str, Any]) -> str:
    """The table to read: milliseconds, medians with quartiles behind PCCL's."""
    others = list(dict.fromkeys(cell["side"] for cell in numbers["cells"] if cell["side"] not in (OURS, NATIVE)))
    names = {name: name.replace("hierarchical", "hier") for name in others}
    head = ["collective", "nodes", "size", "pccl ms", "quartiles", "gloo", "x gloo", "x best", "bound", "x bound"]
    rows = [[*head, *names.values(), "pccl took"]]
    for (collective, nodes, ranks, size), sides in by_place(numbers).items():
        ours, native = sides[OURS], sides[NATIVE]["median"]
        best = min(sides[name]["median"] for name in (NATIVE, "ring", "mpi") if name in sides)
        rows.append(
            [
                *(collective, f"{nodes}x{ranks}", shown(size), _ms(ours["median"])),
                f"{_ms(ours['low'])}-{_ms(ours['high'])}",
                *(_ms(native), f"{native / ours['median']:.2f}", f"{best / ours['median']:.2f}"),
                *((_ms(ours["bound"]), f"{ours['median'] / ours['bound']:.2f}") if ours["bound"] else ("-", "-")),
                *(_ms(sides[name]["median"]) if name in sides else "-" for name in others),
                ours["choice"],
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += ["", "x gloo, x best: how many times as fast as gloo, and as the best of gloo, flat ring and MPI"]
    lines += [f"{side} left out: {reason}" for side, reason in numbers["left_out"].items()]
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def write(numbers: dict[str, Any], folder: Path) -> list[Path]:
    """Write results.json, table.txt and the heat maps into a run's folder."""
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(numbers, indent=1) + "\n")
    (folder / "table.txt").write_text(table(numbers) + "\n")
    files = [folder / "results.json", folder / "table.txt"]
    for over, under, name in ((OURS, NATIVE, "speedup.png"), (*HALVING, "halving.png")):
        if draw(numbers, over, under, folder / name):
            files.append(folder / name)
    return files


def speedups(
    numbers: dict[str, Any], collective: str, ours: str, theirs: str
) -> dict[tuple[int, tuple[int, int]], float]:
    """How many times as fast one side is as another, by bytes and (nodes, ranks a node)."""
    return {
        (size, (nodes, ranks)): sides[theirs]["median"] / sides[ours]["median"]
        for (kind, nodes, ranks, size), sides in by_place(numbers).items()
        if kind == collective and ours in sides and theirs in sides
    }


def draw(numbers: dict[str, Any], ours: str, theirs: str, file: Path) -> bool:
    """Heat maps in the form of Figures 6.6 and 6.9, a panel for each collective; False where there is nothing to draw."""
    maps = {name: speedups(numbers, name, ours, theirs) for name in numbers["settings"]["collectives"]}
    maps = {name: found for name, found in maps.items() if found}
    if not maps:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import TwoSlopeNorm

    figure, panels = pyplot.subplots(1, len(maps), figsize=(4.5 * len(maps), 4.5), squeeze=False)
    for panel, (name, found) in zip(panels[0], maps.items(), strict=True):
        sizes, places = sorted({size for size, _ in found}), list(dict.fromkeys(place for _, place in found))
        grid = [[math.log2(found.get((size, place), 1.0)) for place in places] for size in sizes]
        panel.imshow(grid, cmap="RdYlGn", norm=TwoSlopeNorm(0.0, -2.0, 5.0), aspect="auto", origin="lower")
        for (size, place), ratio in found.items():
            panel.text(places.index(place), sizes.index(size), f"{ratio:.2f}", ha="center", va="center")
        panel.set_xticks(range(len(places)), [f"{nodes * ranks}\n{nodes}x{ranks}" for nodes, ranks in places])
        panel.set_yticks(range(len(sizes)), [shown(size) for size in sizes])
        panel.set_title(name)
        panel.set_xlabel("ranks")
    panels[0][0].set_ylabel("bytes of all blocks")
    figure.suptitle(f"speedup of {ours} over {theirs}")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return True
