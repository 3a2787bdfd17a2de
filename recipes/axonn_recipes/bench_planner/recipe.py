"""``axonn bench planner``: all 4D grids of a cluster measured, beside what the planner predicts from measurements of that cluster."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from axonn_plugins.cli.options import read
from axonn_plugins.cluster import Cluster
from axonn_plugins.cluster.launch import launch
from axonn_plugins.config import ConfigError
from axonn_plugins.planner import machine
from axonn_plugins.planner.choose import outermost
from axonn_recipes.bench.output import publish
from axonn_recipes.bench_network.measure import Measured
from axonn_recipes.bench_network.measure import measure as measure_network
from axonn_recipes.bench_network.report import described as network_described
from axonn_recipes.bench_network.report import toml
from axonn_recipes.bench_planner.measure import collectives as measure_collectives
from axonn_recipes.bench_planner.measure import measure
from axonn_recipes.bench_planner.predict import collectives, counted, formulas
from axonn_recipes.bench_planner.report import errors, pictures, results, text
from axonn_recipes.bench_tp.measure import Side
from axonn_recipes.bench_tp.settings import Settings, Where, name, resolve, under_torchrun
from axonn_recipes.options import Run
from axonn_recipes.runs import new_folder
from axonn_tp import AXES

RING, MATRIX, NETWORK_ROUNDS = 2**24, 512, 15
"""Bytes that rings of the measured network gather, the edge of the matrices that are multiplied, and how often each is timed."""


@dataclass(frozen=True, kw_only=True)
class Options(Where, Run):
    """All 4D grids of a cluster measured, beside what the planner predicts from measurements of that cluster."""

    nodes: int = 2
    ranks_per_node: int = 4
    rounds: int = 5


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's, or grids that do not compute the same.
    """
    options = read(Options, arguments, "axonn bench planner")
    if under_torchrun():
        raise ConfigError(
            "axonn bench planner emulates its cluster and does not run under torchrun; there, use axonn bench network, axonn plan and "
            "axonn bench tp --grids"
        )
    settings = replace(resolve(options, "best", ""), screen=False)
    if options.rounds < 1 or len(settings.grids) < 2:
        raise ConfigError(
            f"there is only one grid of {settings.ranks} ranks for this model; use more ranks, or a larger --batch"
        )
    print(_described(settings), end="\n\n", flush=True)
    if options.dry_run:
        return 0
    folder = new_folder(options.runs, options.name, "bench_planner")
    network, sides, alone = _run(settings)
    folder.mkdir(parents=True)
    file = folder / "machine.toml"
    measured = toml(network, f"{RING >> 20}M", _described(settings).splitlines()[0])
    file.write_text(measured)
    on = machine.load(str(file))
    missed = errors([side.name for side in sides], alone, collectives(on, settings))
    # Before the first table.
    file.write_text(f"collective_error = {missed['collective_error']:.3g}\n{measured}")
    predicted = {"formulas": formulas(on, settings).tolist(), "counted": counted(on, settings).tolist()}
    numbers = results(asdict(settings), sides, predicted) | missed
    print(f"{network_described(network)}\n")
    publish(folder, numbers, text(numbers), pictures(numbers))
    print(file)
    return 0


def _run(settings: Settings) -> tuple[Measured, list[Side], list[dict[str, float]]]:
    """The network, then the grids, then their collectives alone, on one cluster."""
    with ExitStack() as stack:
        start: Any = partial(launch, ranks=settings.ranks)
        if settings.emulated:
            cluster = stack.enter_context(Cluster(settings.nodes, settings.latency, settings.bandwidth))
            start = partial(cluster.launch, ranks_per_node=settings.ranks_per_node)
        network: Measured = start(partial(measure_network, RING, MATRIX, NETWORK_ROUNDS))[0]
        sides: list[Side] = start(partial(measure, settings))[0]
        alone: list[dict[str, float]] = start(partial(measure_collectives, settings))[0]
    outer = [
        {axis: sum(took for name, took in by_axis.items() if outermost(name, grid) == axis) for axis in AXES}
        for grid, by_axis in zip(settings.grids, alone, strict=True)
    ]
    return network, sides, [{axis: took for axis, took in by_axis.items() if took} for by_axis in outer]


def _described(settings: Settings) -> str:
    where = "on this machine"
    if settings.emulated:
        where = f"emulated, latency {settings.latency}, bandwidth {settings.bandwidth or 'unlimited'} a node"
    return (
        f"{settings.ranks} ranks: {settings.nodes} nodes of {settings.ranks_per_node}, {where}\n"
        f"GPT: {settings.layers} blocks, hidden {settings.hidden}, {settings.heads} heads, {settings.batch} x {settings.context} tokens a "
        f"step, fp32, AdamW; weights let go after forward\n"
        f"{len(settings.grids)} grids: {', '.join(name(grid) for grid in settings.grids)}\n"
        f"{settings.rounds} timed steps each, in turns"
    )
