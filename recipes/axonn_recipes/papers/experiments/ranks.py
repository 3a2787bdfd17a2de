"""Measured on ranks of this machine by code of the recipe's own: schedules in Python beside C++, and traces with and without overlap."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_plugins.cluster import Cluster
from axonn_plugins.cluster.launch import launch
from axonn_plugins.observe.figures import Picture
from axonn_plugins.observe.trace import Tracer, trace_file
from axonn_plugins.pccl import Options, register
from axonn_plugins.pccl.backend import using
from axonn_plugins.pccl.build import load
from axonn_plugins.pccl.choice import Choice
from axonn_recipes.bench.rounds import in_turns, slowest
from axonn_recipes.bench_tp import sides
from axonn_recipes.bench_tp.measure import prepare
from axonn_recipes.bench_tp.settings import STAGES, run_on
from axonn_recipes.bench_tp.settings import Options as TensorOptions
from axonn_recipes.papers.found import MEASURED, Experiment, Found

RANKS, BLOCK, ROUNDS, CALLS = 8, 2048, 9, 20
"""Ranks, elements of a block, turns of each side, and calls in a turn."""


def python(folder: Path) -> Found:
    """Figure 6.6 (right): recursive halving by PCCL's C++ backend, and the same exchanges called one by one from Python."""
    load()  # compiles before ranks wait for each other
    times = launch(_halvings, RANKS)[0]
    return Found(
        {
            "eight ranks here: Python's time over C++'s": statistics.median(times["Python"])
            / statistics.median(times["C++"])
        }
    )


def _halvings() -> dict[str, list[float]]:
    """Seconds of the slowest rank, by side; both must compute the same."""
    torch.set_num_threads(1)
    register()
    dist.init_process_group("cpu:pccl", pg_options=replace(Options.from_environment(), tune=False))
    plain = dist.new_group(backend="gloo")
    whole = torch.arange(RANKS * BLOCK, dtype=torch.float32) * (dist.get_rank() + 1)
    own = {name: torch.empty(BLOCK) for name in ("C++", "Python")}
    calls: dict[str, Callable[[], object]] = {
        "C++": lambda: dist.reduce_scatter_tensor(own["C++"], whole),
        "Python": lambda: own["Python"].copy_(halving(whole, plain)),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    with using(Choice("recursive", 1)):
        for call in calls.values():
            call()
        if not torch.equal(own["C++"], own["Python"]):
            raise AssertionError("recursive halving in Python and in C++ gives different sums")
        for _, name in in_turns(tuple(calls), ROUNDS):
            times[name].append(slowest(partial(_repeat, calls[name])))
    dist.destroy_process_group()
    return times


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(CALLS):
        call()


def halving(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's block of the sum over a group of a power of two: half of what is left goes to a partner, in each step."""
    rank, kept = dist.get_rank(group), whole.clone()
    distance = dist.get_world_size(group) // 2
    while distance:
        lower, upper = kept.chunk(2)
        mine, theirs = (upper, lower) if rank & distance else (lower, upper)
        arrived = torch.empty_like(mine)
        sent = dist.isend(theirs, group=group, group_dst=rank ^ distance)
        received = dist.irecv(arrived, group=group, group_src=rank ^ distance)
        for work in (sent, received):
            if work is not None:
                work.wait()
        kept = mine + arrived
        distance //= 2
    return kept


def traces(folder: Path) -> Found:
    """003's Figure 4: a step of two nodes, without any overlap and with all; traces of rank 0 beside the picture."""
    given = TensorOptions(nodes=2, ranks_per_node=1, hidden=512, latency="100us", bandwidth="700Mbit", batch=16)
    settings = run_on(given, "1,1,2", "")
    with Cluster(settings.nodes, settings.latency, settings.bandwidth) as cluster:
        times = cluster.launch(_traced, settings.ranks_per_node, settings, folder)[0]
    before, after = (statistics.median(times[stage]) for stage in (STAGES[0][0], STAGES[-1][0]))
    events = {stage: _events(trace_file(folder / _plain(stage), 0)) for stage in times}
    values = {"here: a step takes less time with overlap": after < before}
    return Found(values, {"steps": Picture(partial(_draw, events), (9, 4))})


def _traced(settings: Any, folder: Path) -> dict[str, list[float]]:
    """Seconds of both stages' steps, of the slowest rank, and a trace of one step each."""
    prepare(settings)
    dist.init_process_group("gloo")
    chosen = {stage: dict(options) for stage, options in (STAGES[0], STAGES[-1])}
    steps = {stage: sides.ours(settings, settings.grids[0], options) for stage, options in chosen.items()}
    times: dict[str, list[float]] = {stage: [] for stage in steps}
    for step in steps.values():
        step()
    for _, stage in in_turns(tuple(steps), 5):
        times[stage].append(slowest(steps[stage]))
    for stage, step in steps.items():
        tracer = Tracer(1, 1, folder / _plain(stage), {})
        with tracer.part_of(1):
            step()
        tracer.done(1)
    dist.destroy_process_group()
    return times


def _plain(stage: str) -> str:
    return stage.replace("+", "").replace(" ", "_")


def _events(file: Path) -> dict[str, list[tuple[float, float]]]:
    """Beginning and length in ms of a trace's products and collectives."""
    found: dict[str, list[tuple[float, float]]] = {"products": [], "collectives": []}
    for event in json.loads(file.read_text())["traceEvents"]:
        name = event.get("name", "")
        kind = (
            "products" if name in ("aten::mm", "aten::addmm") else "collectives" if name.startswith("gloo:") else None
        )
        if kind and "dur" in event:
            found[kind].append((event["ts"] / 1e3, event["dur"] / 1e3))
    return found


def _draw(events: dict[str, dict[str, list[tuple[float, float]]]], figure: Any) -> None:
    panels = figure.subplots(len(events), 1, sharex=True)
    for panel, (stage, rows) in zip(panels, events.items(), strict=True):
        first = min(begin for spans in rows.values() for begin, _ in spans)
        for height, (kind, spans) in enumerate(rows.items()):
            panel.broken_barh([(begin - first, length) for begin, length in spans], (height - 0.4, 0.8), label=kind)
        panel.set_yticks(range(len(rows)), list(rows))
        panel.set_title(stage)
    panels[-1].set_xlabel("ms")


EXPERIMENTS = {
    "kernels_python": Experiment(python, MEASURED, 60),
    "traces": Experiment(traces, MEASURED, 60, root=True),
}
