"""``axonn bench megatron``: Megatron's own TP and DP beside 3D PMM in Megatron, at equal ranks on an emulated cluster."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from axonn_plugins.cli.options import read
from axonn_plugins.cluster import Cluster
from axonn_plugins.observe.progress import say
from axonn_recipes.bench.claims import beside
from axonn_recipes.bench.output import write
from axonn_recipes.bench.rounds import check_losses, in_turns
from axonn_recipes.bench_megatron import report
from axonn_recipes.bench_megatron.measure import Run, measure
from axonn_recipes.bench_megatron.report import MEGATRON, OURS, Side
from axonn_recipes.bench_megatron.settings import Options, Settings, described, resolve
from axonn_recipes.megatron_gpt.settings import Settings as Training
from axonn_recipes.runs import new_folder

TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}
"""Largest relative difference of the first losses that is rounding."""
_CANDIDATES = 2


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's, sides that do not compute the same, or no cluster can be emulated here.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    options = read(Options, arguments, "axonn bench megatron")
    points = resolve(options)
    folder = new_folder(options.runs, options.name, "bench_megatron")
    print(described(points), end="\n\n", flush=True)
    if options.dry_run:
        return 0
    import megatron.core.models.gpt  # noqa: F401  # once here, not in each rank that is forked

    numbers = []
    for point in points:
        with Cluster(point.nodes, point.latency, point.bandwidth) as cluster:
            sides, tried = compare(point, partial(cluster.launch, measure, point.ranks_per_node, point.wire))
        numbers.append(report.results(point, sides, tried))
        print(report.point_text(numbers[-1]), *_beside(point, numbers[-1]), sep="\n", end="\n\n", flush=True)
    write(folder, numbers, report.text(numbers), report.pictures(numbers))
    return 0


def _beside(point: Settings, numbers: dict[str, Any]) -> list[str]:
    """A point's ratios beside those that the README has of it."""
    found = {"each at its best": numbers["ratio"], "as it comes": numbers["ratio_as_it_comes"]}
    medians = {f"Megatron, {what}": ratio["median"] for what, ratio in found.items()}
    return beside(__file__, lambda words: resolve(read(Options, words)), point, medians)


def compare(point: Settings, run: Callable[[Training], list[Run]]) -> tuple[list[Side], dict[str, dict[str, float]]]:
    """Find each side's fastest way, then time these in turns; Megatron as it comes, with nothing turned on, is a third.

    Args:
        point: what to measure.
        run: runs a side; what each rank found.

    Returns:
        The sides, and seconds of all that was tried, by system and name.

    Raises:
        ConfigError: the sides do not compute the same losses.
    """
    tried: dict[str, dict[str, float]] = {}
    sides = []
    for system, splits in ((MEGATRON, point.megatron()), (OURS, point.ours())):
        tried[system] = {}
        for name, training in splits.items():
            tried[system][name] = _brief(run, training, f"{system} {name}")
        ways: dict[str, Training] = dict(splits)
        for name in sorted(splits, key=lambda each: tried[system][each])[:_CANDIDATES]:
            for what, training in point.variants(splits[name]).items():
                called = ", ".join(filter(None, (name, what)))
                ways[called] = training
                if called not in tried[system]:
                    tried[system][called] = _brief(run, training, f"{system} {called}")
        plain = min(splits, key=lambda each: tried[system][each])
        best = min(tried[system], key=lambda each: tried[system][each])
        if system == MEGATRON and plain != best:
            sides.append(Side(system, plain, ways[plain]))
        sides.append(Side(system, best, ways[best]))
    for _, side in in_turns(sides, point.rounds):
        _add(side, run(side.training))
    check_losses(sides, TOLERANCES[point.precision], True, "use --precision fp32 or other --grids")
    return sides, tried


def _brief(run: Callable[[Training], list[Run]], training: Training, what: str) -> float:
    (seconds,) = run(replace(training, steps=1))[0].seconds
    say(f"{what}: {seconds:.3f} s")
    return seconds


def _add(side: Side, found: list[Run]) -> None:
    side.run = found[0]
    side.seconds.append(statistics.median(found[0].seconds))
    axes = {axis for each in found for axis in each.sent}
    side.sent = {axis: max(each.sent.get(axis, 0.0) for each in found) for axis in sorted(axes)}
