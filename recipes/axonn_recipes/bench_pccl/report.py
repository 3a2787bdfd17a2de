"""The report of a run: a table and pictures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from axonn_plugins.cluster.units import bits_per_second, nanoseconds
from axonn_plugins.observe.figures import Picture
from axonn_recipes.bench.numbers import spread
from axonn_recipes.bench.output import ms, quartiles, table, two
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
    least = None
    if settings.emulated:
        latency, bits = nanoseconds(settings.latency) / 1e9, bits_per_second(settings.bandwidth)
        bandwidth = bits / 8 if bits else math.inf
        least = bound(cell["collective"], cell["bytes"], cell["nodes"], latency, bandwidth)
    return {**spread(cell["seconds"]), "bound": least}


def by_place(numbers: dict[str, Any]) -> dict[tuple[str, int, int, int], dict[str, dict[str, Any]]]:
    """Cells by (collective, nodes, ranks a node, bytes), then by side."""
    found: dict[tuple[str, int, int, int], dict[str, dict[str, Any]]] = {}
    for cell in numbers["cells"]:
        place = cell["collective"], cell["nodes"], cell["ranks_per_node"], cell["bytes"]
        found.setdefault(place, {})[cell["side"]] = cell
    return found


def text(numbers: dict[str, Any]) -> str:
    """The report as text: milliseconds, medians with quartiles behind PCCL's."""
    others = list(dict.fromkeys(cell["side"] for cell in numbers["cells"] if cell["side"] not in (OURS, NATIVE)))

    def times(sides: dict[str, dict[str, Any]], *names: str) -> float:
        """The time of the best of these over PCCL's."""
        return min(sides[name]["median"] for name in names if name in sides) / sides[OURS]["median"]

    columns: dict[str, Callable[[dict[str, dict[str, Any]]], str]] = {
        "collective": lambda sides: sides[OURS]["collective"],
        "nodes": lambda sides: f"{sides[OURS]['nodes']}x{sides[OURS]['ranks_per_node']}",
        "size": lambda sides: shown(sides[OURS]["bytes"]),
        "pccl ms": lambda sides: ms(sides[OURS]["median"]),
        "quartiles": lambda sides: quartiles(sides[OURS]),
        "gloo": lambda sides: ms(sides[NATIVE]["median"]),
        "x gloo": lambda sides: two(times(sides, NATIVE)),
        "x best": lambda sides: two(times(sides, NATIVE, "ring", "mpi")),
        "bound": lambda sides: ms(sides[OURS]["bound"]) if sides[OURS]["bound"] else "-",
        "x bound": lambda sides: two(sides[OURS]["median"] / sides[OURS]["bound"]) if sides[OURS]["bound"] else "-",
    }
    for name in others:
        columns[name.replace("hierarchical", "hier")] = lambda sides, name=name: (  # type: ignore[misc]
            ms(sides[name]["median"]) if name in sides else "-"
        )
    columns["pccl took"] = lambda sides: sides[OURS]["choice"]
    lines = [table(columns, by_place(numbers).values()), ""]
    lines.append("x gloo, x best: how many times as fast as gloo, and as the best of gloo, flat ring and MPI")
    return "\n".join([*lines, *(f"{side} left out: {reason}" for side, reason in numbers["left_out"].items())])


def pictures(numbers: dict[str, Any]) -> dict[str, Picture]:
    """Heat maps in the form of Figures 6.6 and 6.9, where there is anything to draw."""
    made = {}
    for ours, theirs, name in ((OURS, NATIVE, "speedup.png"), (*HALVING, "halving.png")):
        maps = {kind: speedups(numbers, kind, ours, theirs) for kind in numbers["settings"]["collectives"]}
        maps = {kind: found for kind, found in maps.items() if found}
        if maps:
            title = f"speedup of {ours} over {theirs}"
            made[name] = Picture(partial(_heat_maps, maps, title), (4.5 * len(maps), 4.5))
    return made


def speedups(
    numbers: dict[str, Any], collective: str, ours: str, theirs: str
) -> dict[tuple[int, tuple[int, int]], float]:
    """Time of one side over that of another, by bytes and (nodes, ranks a node)."""
    return {
        (size, (nodes, ranks)): sides[theirs]["median"] / sides[ours]["median"]
        for (kind, nodes, ranks, size), sides in by_place(numbers).items()
        if kind == collective and ours in sides and theirs in sides
    }


def _heat_maps(maps: dict[str, dict[tuple[int, tuple[int, int]], float]], title: str, figure: Any) -> None:
    """A panel for each collective."""
    from matplotlib.colors import TwoSlopeNorm

    panels = figure.subplots(1, len(maps), squeeze=False)[0]
    for panel, (name, found) in zip(panels, maps.items(), strict=True):
        sizes, places = sorted({size for size, _ in found}), list(dict.fromkeys(place for _, place in found))
        grid = [[math.log2(found.get((size, place), 1.0)) for place in places] for size in sizes]
        panel.imshow(grid, cmap="RdYlGn", norm=TwoSlopeNorm(0.0, -2.0, 5.0), aspect="auto", origin="lower")
        for (size, place), times in found.items():
            panel.text(places.index(place), sizes.index(size), f"{times:.2f}", ha="center", va="center")
        panel.set_xticks(range(len(places)), [f"{nodes * ranks}\n{nodes}x{ranks}" for nodes, ranks in places])
        panel.set_yticks(range(len(sizes)), [shown(size) for size in sizes])
        panel.set_title(name)
        panel.set_xlabel("ranks")
    panels[0].set_ylabel("bytes of all blocks")
    figure.suptitle(title)
