"""``axonn bench tp``: 3D PMM and its peers side by side, on an emulated cluster, this machine, or under torchrun."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from axonn_plugins.cli.options import read
from axonn_plugins.cluster import Cluster
from axonn_plugins.cluster.launch import launch
from axonn_plugins.config import ConfigError
from axonn_plugins.observe.timeline import report as timeline
from axonn_recipes.bench.claims import beside
from axonn_recipes.bench.output import publish
from axonn_recipes.bench_tp import report, sides
from axonn_recipes.bench_tp.measure import Side, compute_only, measure
from axonn_recipes.bench_tp.settings import Options, Settings, described, resolve, under_torchrun
from axonn_recipes.runs import new_folder


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's, or sides that do not compute the same.
    """
    options = read(Options, arguments, "axonn bench tp")
    settings = resolve(options)
    if settings.timeline and torch.cuda.is_available():
        raise ConfigError("--timeline watches steps on CPUs; leave it out where there are GPUs")
    folder = new_folder(options.runs, options.name, "bench_tp")
    first = os.environ.get("RANK", "0") == "0"
    if first:
        print(described(settings), end="\n\n", flush=True)
    if options.dry_run:
        return 0
    left_out = {peer: reason for peer in settings.peers if (reason := sides.absent(peer))}
    measured = _under_torchrun(settings) if under_torchrun() else _launched(settings)
    if first:
        numbers = report.results(settings, measured, left_out)
        same = replace(settings, timeline=False)
        said = beside(__file__, lambda words: resolve(read(Options, words)), same, report.against(numbers))
        publish(folder, numbers, "\n".join([report.text(numbers), *said]), report.pictures(numbers))
        for side in measured:
            if side.timeline is not None:
                _show(side, folder)
    return 0


def _show(side: Side, folder: Path) -> None:
    """Print a side's timeline, and keep it in the run's folder."""
    assert side.timeline is not None
    file = folder / f"timeline-{re.sub('[^a-z0-9A-Z]+', '-', side.name)}.json"
    timeline.write(side.timeline, file)
    pictures = timeline.picture(side.timeline).save(file.with_suffix(".png"))
    print(f"\n{side.name}: {timeline.table(side.timeline, explained=False)}", file, *pictures, sep="\n")


def _under_torchrun(settings: Settings) -> list[Side]:
    measured = measure(settings)
    dist.destroy_process_group()
    return measured


def _launched(settings: Settings) -> list[Side]:
    """Measure on ranks of this machine, then once more without communication."""
    with ExitStack() as stack:
        start = _starter(settings, stack)
        measured: list[Side] = start(_rank, settings)[0]
        names = [side.name for side in measured if side.name not in sides.NEED_COMMUNICATION]
        computed = _slowest(start(compute_only, settings, names))
    for side in measured:
        if side.name in computed:
            side.compute = statistics.median(computed[side.name])
    return measured


def _starter(settings: Settings, stack: ExitStack) -> Callable[..., list[Any]]:
    if not settings.emulated:
        return lambda function, *arguments: launch(function, settings.ranks, *arguments)
    cluster = stack.enter_context(Cluster(settings.nodes, settings.latency, settings.bandwidth))
    return lambda function, *arguments: cluster.launch(function, settings.ranks_per_node, *arguments)


def _rank(settings: Settings) -> list[Side]:
    measured = measure(settings)
    for side in measured:
        del side.build  # it cannot be sent to the process that started the ranks, nor be of use there
    return measured


def _slowest(by_rank: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Each step's seconds on the slowest rank."""
    return {
        name: [max(times) for times in zip(*(found[name] for found in by_rank), strict=True)] for name in by_rank[0]
    }
