"""``axonn bench planner``: all 4D grids of a cluster measured, beside what the planner predicts from measurements of that cluster."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from axonn_plugins.cli.options import read
from axonn_plugins.cluster import Cluster
from axonn_plugins.cluster.launch import launch
from axonn_plugins.config import ConfigError
from axonn_plugins.observe.files import put
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
from axonn_recipes.bench_tp.settings import Settings, Where, name, run_on, under_torchrun
from axonn_recipes.options import Run
from axonn_recipes.runs import new_folder
from axonn_tp import AXES, Grid

RING, MATRIX, NETWORK_ROUNDS = 2**24, 512, 15
"""Bytes that rings of the measured network gather, the edge of the matrices that are multiplied, and how often each is timed."""
_MACHINE = "machine.toml"


@dataclass(frozen=True, kw_only=True)
class Options(Where, Run):
    """All 4D grids of a cluster measured, beside what the planner predicts from measurements of that cluster.

    Attributes:
        models: several GPTs, as layers,hidden,heads,context,batch separated by spaces, such as "2,256,8,64,16 4,512,8,32,8"; by itself
            the one of --layers and so on.
    """

    nodes: int = 2
    ranks_per_node: int = 4
    rounds: int = 5
    models: str | None = None


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
    if options.backend != "gloo":
        raise ConfigError(
            f"--backend {options.backend} is not for axonn bench planner, which predicts rings of gloo or NCCL; leave it out, or measure grids "
            "by axonn bench tp"
        )
    every = [replace(run_on(one, "best", ""), screen=False) for one in _models(options)]
    for settings in every:
        if options.rounds < 1 or len(settings.grids) < 2:
            raise ConfigError(
                f"there is only one grid of {settings.ranks} ranks for this model; use more ranks, or a larger --batch"
            )
        print(_described(settings), end="\n\n", flush=True)
    if options.dry_run:
        return 0
    folder = new_folder(options.runs, options.name, "bench_planner")
    network, measured = _run(every)
    text = toml(network, f"{RING >> 20}M", _described(every[0]).splitlines()[0])
    with TemporaryDirectory() as aside:
        unjudged = Path(aside) / _MACHINE
        unjudged.write_text(text)
        on = machine.load(str(unjudged))
    missed = [
        errors([side.name for side in sides], alone, collectives(on, settings))
        for settings, (sides, alone) in zip(every, measured, strict=True)
    ]
    # Before the first table.
    off = statistics.median(one["collective_error"] for one in missed)
    folder.mkdir(parents=True)
    file = folder / _MACHINE
    put(file, f"collective_error = {off:.3g}\n{text}")
    print(f"{network_described(network)}\n")
    for number, (settings, (sides, _), wrong) in enumerate(zip(every, measured, missed, strict=True)):
        predicted = {"formulas": formulas(on, settings).tolist(), "counted": counted(on, settings).tolist()}
        _publish(folder if len(every) == 1 else folder / f"model{number}", settings, sides, predicted, wrong)
    print(file)
    return 0


def _publish(
    folder: Path, settings: Settings, sides: list[Side], predicted: dict[str, list[float]], missed: dict[str, Any]
) -> None:
    numbers = results(asdict(settings), sides, predicted) | missed
    folder.mkdir(exist_ok=True)
    print(_model(settings))
    publish(folder, numbers, text(numbers), pictures(numbers))


def _models(options: Options) -> list[Options]:
    """The options of each model."""
    if options.models is None:
        return [options]
    keys, found = ("layers", "hidden", "heads", "context", "batch"), []
    for given in options.models.split():
        sizes = given.split(",")
        if len(sizes) != len(keys) or not all(re.fullmatch("[1-9][0-9]{0,5}", size) for size in sizes):
            raise ConfigError(
                f'--models = "{given}" is not {",".join(keys)}; write five whole numbers, such as 2,256,8,64,16'
            )
        chosen: dict[str, Any] = dict(zip(keys, map(int, sizes), strict=True))
        found.append(replace(options, **chosen))
    if not found:
        raise ConfigError('--models = "" names none; write one such as 2,256,8,64,16, or leave it out')
    return found


def _run(every: list[Settings]) -> tuple[Measured, list[tuple[list[Side], list[dict[str, float]]]]]:
    """The network, then of each model the grids, and their collectives alone, on one cluster."""
    first, measured = every[0], []
    with ExitStack() as stack:
        start: Any = partial(launch, ranks=first.ranks)
        if first.emulated:
            cluster = stack.enter_context(Cluster(first.nodes, first.latency, first.bandwidth))
            start = partial(cluster.launch, ranks_per_node=first.ranks_per_node)
        network: Measured = start(partial(measure_network, RING, MATRIX, NETWORK_ROUNDS))[0]
        for settings in every:
            sides: list[Side] = start(partial(measure, settings))[0]
            alone: list[dict[str, float]] = start(partial(measure_collectives, settings))[0]
            measured.append((sides, [_outer(grid, one) for grid, one in zip(settings.grids, alone, strict=True)]))
    return network, measured


def _outer(grid: Grid, by_axis: dict[str, float]) -> dict[str, float]:
    """Seconds by axis, what goes over several as over the outermost."""
    found = {axis: sum(took for name, took in by_axis.items() if outermost(name, grid) == axis) for axis in AXES}
    return {axis: took for axis, took in found.items() if took}


def _described(settings: Settings) -> str:
    where = "on this machine"
    if settings.emulated:
        where = f"emulated, latency {settings.latency}, bandwidth {settings.bandwidth or 'unlimited'} a node"
    return (
        f"{settings.ranks} ranks: {settings.nodes} nodes of {settings.ranks_per_node}, {where}\n"
        f"{_model(settings)} a step, fp32, AdamW; weights let go after forward\n"
        f"{len(settings.grids)} grids: {', '.join(name(grid) for grid in settings.grids)}\n"
        f"{settings.rounds} timed steps each, in turns"
    )


def _model(settings: Settings) -> str:
    return (
        f"GPT: {settings.layers} blocks, hidden {settings.hidden}, {settings.heads} heads, "
        f"{settings.batch} x {settings.context} tokens"
    )
