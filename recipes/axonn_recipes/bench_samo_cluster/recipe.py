"""``axonn bench samo_cluster``: batch time of dense data parallelism and of SAMO on an emulated cluster."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from axonn_plugins.cli.options import read
from axonn_plugins.cluster import Cluster
from axonn_recipes.bench.numbers import ratio
from axonn_recipes.bench.output import compared, extremes, mib, publish, table
from axonn_recipes.bench_samo_cluster.measure import ALONE, DENSE, SAMO, Side, measure
from axonn_recipes.bench_samo_cluster.settings import HALF, Options, Settings, described, resolve
from axonn_recipes.runs import new_folder

_TRIES, _TRY_ROUNDS, _CLOSE = 6, 7, 0.03


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's, or no cluster can be emulated here.
    """
    options = read(Options, arguments, "axonn bench samo_cluster")
    settings = resolve(options)
    folder = new_folder(options.runs, options.name, "bench_samo_cluster")
    print(described(settings), end="\n\n", flush=True)
    if options.dry_run:
        return 0
    if settings.bandwidth == HALF:
        settings = halved(settings)
    numbers = results(settings, run(settings))
    publish(folder, numbers, text(numbers))
    return 0


def run(settings: Settings) -> dict[str, Side]:
    """Measure on a cluster of its own; sides by name."""
    with Cluster(settings.nodes, settings.latency, settings.bandwidth) as cluster:
        return {side.name: side for side in cluster.launch(measure, settings.ranks_per_node, settings, cluster)[0]}


def halved(settings: Settings) -> Settings:
    """The bandwidth at which the dense side's communication is half of its step, found by trying."""
    brief, bandwidth = replace(settings, rounds=min(settings.rounds, _TRY_ROUNDS)), 500e6
    tried: dict[float, str] = {}
    for _ in range(_TRIES):
        brief = replace(brief, bandwidth=f"{bandwidth / 1e6:.1f}Mbit")
        dense, alone = communicated(run(brief), DENSE)
        share = 1 - alone / dense
        print(f"{brief.bandwidth}: communication is {share:.0%} of the dense step", flush=True)
        tried[abs(share - 0.5)] = brief.bandwidth
        if min(tried) < _CLOSE:
            break
        bandwidth *= min(max((dense - alone) / alone, 0.2), 5.0)
    print()
    return replace(settings, bandwidth=tried[min(tried)])


def communicated(sides: dict[str, Side], name: str) -> tuple[float, float]:
    """Median seconds of a side's step, and of the same step without communication."""
    return statistics.median(sides[name].seconds), statistics.median(sides[name + ALONE].seconds)


def results(settings: Settings, sides: dict[str, Side]) -> dict[str, Any]:
    """Everything measured, as what JSON can hold; seconds and bytes."""
    dense, alone = communicated(sides, DENSE)
    return {
        "settings": asdict(settings),
        "torch": torch.__version__,
        "sides": [{**asdict(side), "median": statistics.median(side.seconds)} for side in sides.values()],
        "communication_share_of_dense": 1 - alone / dense,
        "ratio": ratio(sides[DENSE].seconds, sides[SAMO].seconds),
    }


def text(numbers: dict[str, Any]) -> str:
    """The sides, and what they come to in two sentences."""
    settings = numbers["settings"]
    ours = next(side for side in numbers["sides"] if side["name"] == SAMO)
    shown = table(
        {
            "": lambda side: side["name"],
            "step ms": lambda side: f"{side['median'] * 1e3:.1f}",
            "min-max": lambda side: extremes(side["seconds"], lambda seconds: f"{seconds * 1e3:.0f}"),
            "all-reduced MiB": lambda side: mib(side["reduced"], 3),
            "on the wire MiB": lambda side: mib(side["wire"], 2),
            "state MiB": lambda side: mib(side["state"], 2),
        },
        numbers["sides"],
    )
    return "\n".join(
        [
            shown,
            "",
            f"bandwidth {settings['bandwidth']}: communication is {numbers['communication_share_of_dense']:.0%} of the dense step",
            f"dense / SAMO: {compared(numbers['ratio'])}",
            f"SAMO all-reduces {ours['reduced']:,} bytes: {ours['reduced'] / ours['kept']:.3g} for each of {ours['kept']:,} "
            f"parameters kept of {ours['parameters']:,}",
        ]
    )
