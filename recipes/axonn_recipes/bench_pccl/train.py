"""``axonn bench pccl --train``: ZeRO-3 with gloo's collectives and with PCCL's."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from axonn_plugins.config import ConfigError
from axonn_plugins.pccl.build import load
from axonn_recipes.bench_pccl.places import on_each
from axonn_recipes.bench_pccl.report import quartiles
from axonn_recipes.bench_pccl.train_settings import SIDES, Training, apart, described, parser, resolve
from axonn_recipes.bench_tp.settings import under_torchrun
from axonn_recipes.runs import new_folder

MIB = 2**20


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's, no DeepSpeed, or sides that do not compute the same.
    """
    options = parser().parse_args(arguments)
    settings = resolve(options)
    first = os.environ.get("RANK", "0") == "0"
    if first:
        print(described(settings), end="\n\n", flush=True)
    if options.dry_run:
        return 0
    folder = new_folder(options.runs, options.name, "bench_pccl_train") if first else None
    load()  # compiles before ranks wait for each other
    try:
        from axonn_recipes.bench_pccl.train_sides import measure
    except ModuleNotFoundError as missing:
        raise ConfigError(f"ZeRO-3 needs DeepSpeed, but {missing}; run pip install deepspeed") from None
    measured = [measure(settings)] if under_torchrun() else on_each(settings, measure, settings)
    if folder:
        numbers = results(settings, measured)
        print(table(numbers), end="\n\n")
        print(*write(numbers, folder), sep="\n")
    return 0


def results(settings: Training, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything measured, as what JSON can hold; seconds and bytes."""
    return {
        "settings": asdict(settings),
        "torch": torch.__version__,
        "clusters": [cluster | _numbers(cluster, settings.tokens) for cluster in measured],
    }


def _numbers(cluster: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Each side's step and tokens a second over all ranks, and how many times as fast PCCL is, turn by turn."""
    turns = {side: [turn for turn in cluster["turns"] if turn["side"] == side] for side in SIDES}
    found: dict[str, Any] = {}
    for side in SIDES:
        low, median, high = quartiles([seconds for turn in turns[side] for seconds in turn["seconds"]])
        found[side] = {"median": median, "low": low, "high": high}
        found[side]["tokens_per_s"] = tokens * cluster["nodes"] * cluster["ranks_per_node"] / median
    by_turn = [
        statistics.median(theirs["seconds"]) / statistics.median(ours["seconds"])
        for theirs, ours in zip(*turns.values(), strict=True)
    ]
    found["speedup"] = found["gloo"]["median"] / found["pccl"]["median"]
    found["speedup_by_turn"] = by_turn
    found["losses_apart"] = max(apart(theirs, ours) for theirs, ours in zip(*turns.values(), strict=True))
    return found


def table(numbers: dict[str, Any]) -> str:
    """The table to read."""
    lines: list[str] = []
    for cluster in numbers["clusters"]:
        lines += [f"{cluster['nodes']}x{cluster['ranks_per_node']} ranks  step s  quartiles    tokens/s  losses"]
        for side in SIDES:
            found, losses = cluster[side], next(turn["losses"] for turn in cluster["turns"] if turn["side"] == side)
            spread = f"{found['low']:.3f}-{found['high']:.3f}"
            cells = f"{side:9}  {found['median']:.3f}   {spread}  {found['tokens_per_s']:8,.0f}  "
            lines.append(cells + " ".join(f"{loss:.6f}" for loss in losses))
        by_turn = cluster["speedup_by_turn"]
        lines += [
            f"pccl trains {cluster['speedup']:.2f} times gloo's tokens/s (by turns {min(by_turn):.2f} to {max(by_turn):.2f})",
            f"the sides' losses differ by at most {cluster['losses_apart']:.1e}",
            f"a step of a rank, ring's bytes: {_calls(cluster['turns'][0])}",
            "",
        ]
    return "\n".join(lines[:-1])


def _calls(turn: dict[str, Any]) -> str:
    return ", ".join(f"{count} {op} ({turn['sent'][op] / MIB:.2f} MiB)" for op, count in turn["calls"].items())


def write(numbers: dict[str, Any], folder: Path) -> list[Path]:
    """Write results.json and table.txt into a run's folder."""
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(numbers, indent=1) + "\n")
    (folder / "table.txt").write_text(table(numbers) + "\n")
    return [folder / "results.json", folder / "table.txt"]
