"""``axonn bench pccl --train``: ZeRO-3 with gloo's collectives and with PCCL's."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from axonn_plugins.cli.options import read
from axonn_plugins.config import ConfigError
from axonn_plugins.pccl.build import load
from axonn_recipes.bench.numbers import ratios, spread
from axonn_recipes.bench.output import mib, publish, quartiles, table, three
from axonn_recipes.bench.rounds import apart
from axonn_recipes.bench_pccl.places import on_each
from axonn_recipes.bench_pccl.train_settings import SIDES, Options, Training, described, resolve
from axonn_recipes.bench_tp.settings import under_torchrun
from axonn_recipes.runs import new_folder


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's, no DeepSpeed, or sides that do not compute the same.
    """
    options = read(Options, arguments, "axonn bench pccl --train")
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
        publish(folder, numbers, text(numbers))
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
        found[side] = spread([seconds for turn in turns[side] for seconds in turn["seconds"]])
        found[side]["tokens_per_s"] = tokens * cluster["nodes"] * cluster["ranks_per_node"] / found[side]["median"]
    by_turn = ratios(*([statistics.median(turn["seconds"]) for turn in turns[side]] for side in SIDES))
    found["speedup"] = found["gloo"]["median"] / found["pccl"]["median"]
    found["speedup_by_turn"] = by_turn
    found["losses_apart"] = max(
        apart(theirs["losses"], ours["losses"]) for theirs, ours in zip(*turns.values(), strict=True)
    )
    return found


def text(numbers: dict[str, Any]) -> str:
    """The tables to read, one for each cluster."""
    return "\n\n".join(_cluster(cluster) for cluster in numbers["clusters"])


def _cluster(cluster: dict[str, Any]) -> str:
    losses = {turn["side"]: turn["losses"] for turn in reversed(cluster["turns"])}
    by_turn = cluster["speedup_by_turn"]
    shown = table(
        {
            f"{cluster['nodes']}x{cluster['ranks_per_node']} ranks": lambda side: side,
            "step s": lambda side: three(cluster[side]["median"]),
            "quartiles": lambda side: quartiles(cluster[side], three),
            "tokens/s": lambda side: f"{cluster[side]['tokens_per_s']:,.0f}",
            "losses": lambda side: " ".join(f"{loss:.6f}" for loss in losses[side]),
        },
        SIDES,
    )
    return "\n".join(
        [
            shown,
            f"pccl trains {cluster['speedup']:.2f} times gloo's tokens/s (by turns {min(by_turn):.2f} to {max(by_turn):.2f})",
            f"the sides' losses differ by at most {cluster['losses_apart']:.1e}",
            f"a step of a rank, ring's bytes: {_calls(cluster['turns'][0])}",
        ]
    )


def _calls(turn: dict[str, Any]) -> str:
    return ", ".join(f"{count} {op} ({mib(turn['sent'][op], 2)} MiB)" for op, count in turn["calls"].items())
