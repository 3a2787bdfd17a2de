"""000's chapter 6 at its scale: PCCL beside RCCL, NCCL and Cray MPICH by the simulator of `axonn simulate pccl`, whose file is read."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from itertools import pairwise, product
from pathlib import Path

import torch
from torch import nn

from axonn_plugins.observe.figures import Picture
from axonn_plugins.pccl import simulate_cli
from axonn_plugins.pccl.calibration import Calibrated, load
from axonn_plugins.pccl.clusters import CLUSTERS
from axonn_plugins.pccl.sweep import PUBLISHED
from axonn_plugins.planner import machine, model
from axonn_plugins.planner.collectives import point_to_point
from axonn_recipes.models.gpt import GPT, GPTConfig
from axonn_recipes.papers.data import Value
from axonn_recipes.papers.experiments.grids import best, less
from axonn_recipes.papers.found import COUNTED, MODEL, Experiment, Found
from axonn_recipes.planner.outcome import heat, lines
from axonn_recipes.validation.problems import gpt_plan
from axonn_tp import Grid
from axonn_tp import place as placements

GATHER, SCATTER = "all_gather", "reduce_scatter"
OPTIONS = ("--calibrated",)
"""Options of the simulator."""
NODE, _MB = 4, 2e-6
"""Ranks of x in Figure 6.1, and megabytes of a number in 16 bits."""
SIZES = (16, 32, 64, 128, 256, 512, 1024)

Times = dict[tuple[str, str, int, int], float]
"""Seconds by system, collective, processes and MB."""


@cache
def times(cluster: str) -> Times:
    """Times by the simulator, with the latencies that it takes for best: those that its file has last."""
    with tempfile.TemporaryDirectory() as folder:
        with redirect_stdout(StringIO()):
            simulate_cli.main([*OPTIONS, "--cluster", cluster, "--out", folder])
        (file,) = Path(folder).glob(f"{cluster}*.json")
        rows = json.loads(file.read_text())["times"]
    kind = rows[-1]["latency"]
    return {
        (row["system"], row["collective"], row["processes"], row["mb"]): row["seconds"]
        for row in rows
        if row["latency"] == kind
    }


def ratios(
    cluster: str, other: str, collective: str, processes: Iterable[int], sizes: Iterable[int], ours: str = "PCCL"
) -> list[float]:
    """The other's time over ours, of all processes and sizes."""
    at = times(cluster)
    cells = product((collective,), processes, sizes)
    return [at[(other, *cell)] / at[(ours, *cell)] for cell in cells]


def _span(what: str, found: list[float]) -> dict[str, Value]:
    return {f"{what}, least": min(found), f"{what}, most": max(found)}


def libraries(folder: Path) -> Found:
    """Figures 6.2 to 6.4: Cray MPICH beside RCCL on Frontier; with sums on the GPU MPICH's reduce-scatter takes its messages' time, as its all-gather."""
    at = times("frontier")
    gather = ratios("frontier", "Cray MPICH", GATHER, (32,), (256, 512), "RCCL")
    scatter = ratios("frontier", "Cray MPICH", SCATTER, (32, 64, 128), (256, 512), "RCCL")
    counts = (64, 128, 256, 512, 1024, 2048)
    values: dict[str, Value] = {
        "all-gather on 32 GCDs, 256 and 512 MB: MPICH over RCCL": sum(gather) / 2,
        **_span("reduce-scatter: MPICH over RCCL", scatter),
        "reduce-scatter: twice as fast as MPICH at least with sums on the GPU": min(
            at["Cray MPICH", SCATTER, count, size] / at["Cray MPICH", GATHER, count, size]
            for count, size in product((32, 64, 128), (256, 512))
        )
        >= 2,
    }
    for library, size in product(("RCCL", "Cray MPICH"), (64, 128)):
        grown = [at[library, GATHER, count, size] for count in counts]
        values[f"{library}, {size} MB: takes longer with more GCDs"] = grown == sorted(grown)
    series = {
        f"{library}, {size} MB": (list(counts), [at[library, GATHER, count, size] for count in counts])
        for library, size in product(("RCCL", "Cray MPICH"), (64, 128))
    }
    return Found(values, {"all_gather": lines("All-gather on Frontier, simulated", "GCDs", "s", series)})


def frontier(folder: Path) -> Found:
    """Figures 6.7 to 6.9."""
    values: dict[str, Value] = {
        **_span("all-gather on 2048, 64 to 512 MB: over RCCL", ratios("frontier", "RCCL", GATHER, (2048,), SIZES[2:6])),
        **_span(
            "all-gather on 2048, 64 to 512 MB: over MPICH",
            ratios("frontier", "Cray MPICH", GATHER, (2048,), SIZES[2:6]),
        ),
    }
    for collective in (GATHER, SCATTER):
        name = collective.replace("_", "-")
        for count, size in ((32, 1024), (2048, 16), (2048, 32), (2048, 64), (2048, 512), (2048, 1024)):
            values[f"{name}, {count} GCDs, {size} MB"] = ratios("frontier", "RCCL", collective, (count,), (size,))[0]
        for other in ("RCCL", "Cray MPICH"):
            least = ratios("frontier", other, collective, (1024, 2048), (64, 128, 256, 512))
            values[f"{name}: faster than {other} on 1024 and 2048"] = min(least) > 1
    return Found(values, {"curves": _curves("frontier", "RCCL"), "speedup": _by_processes("frontier", "RCCL")})


def halving(folder: Path) -> Found:
    """Figure 6.6 (left): reduce-scatter on Frontier with a ring between nodes, over recursive halving; both with a ring within."""
    on = Calibrated(CLUSTERS["frontier"], load())
    ring, halves = (("hierarchical_ring_ring", 1), PUBLISHED)
    gain = {
        (count, size): on.scheduled(ring, SCATTER, count, size) / on.scheduled(halves, SCATTER, count, size)
        for count, size in product(_PROCESSES, SIZES)
    }
    values: dict[str, Value] = {
        "halving is faster than the ring on 2048 GCDs, 16 MB": gain[2048, 16] > 1,
        "the ring is no slower on 32 GCDs, 1024 MB": gain[32, 1024] < 1.01,
        "halving gains more with more GCDs and with less data": all(
            gain[more, smaller] >= gain[count, size]
            for (count, more), (smaller, size) in product(pairwise(_PROCESSES), pairwise(SIZES))
        ),
    }
    rows = [{"GCDs": count, "MB": size, "speedup": found} for (count, size), found in gain.items()]
    return Found(values, {"speedup": heat("Halving over the ring, simulated", "GCDs", "MB", rows, "speedup")})


def _both(other: str, processes: Iterable[int], sizes: Iterable[int]) -> list[float]:
    """`ratios` of both collectives on Perlmutter."""
    return [one for each in (GATHER, SCATTER) for one in ratios("perlmutter", other, each, processes, sizes)]


def perlmutter(folder: Path) -> Found:
    """Figures 6.10 and 6.11."""
    values: dict[str, Value] = {}
    values |= _span("1024 and 2048 GPUs, 64 and 128 MB: over NCCL", _both("NCCL", (1024, 2048), (64, 128)))
    values |= _span("1024 and 2048 GPUs, 64 and 128 MB: over MPICH", _both("Cray MPICH", (1024, 2048), (64, 128)))
    values |= _span("1024 and 2048 GPUs, 16 and 32 MB: over NCCL", _both("NCCL", (1024, 2048), (16, 32)))
    values |= _span("2048 GPUs, 128 to 512 MB: over NCCL", _both("NCCL", (2048,), (128, 256, 512)))
    values["32 GPUs, 1024 MB: NCCL's speed over ours"] = 1 / ratios("perlmutter", "NCCL", GATHER, (32,), (1024,))[0]
    return Found(values, {"curves": _curves("perlmutter", "NCCL"), "speedup": _by_processes("perlmutter", "NCCL")})


_PROCESSES = (32, 64, 128, 256, 512, 1024, 2048)


def _curves(cluster: str, library: str) -> Picture:
    at = times(cluster)
    series = {
        f"{system}, {size} MB": (list(_PROCESSES), [at[system, GATHER, count, size] for count in _PROCESSES])
        for system in ("PCCL", library, "Cray MPICH")
        for size in (64, 512)
    }
    return lines(f"All-gather on {cluster.capitalize()}, simulated", "processes", "s", series)


def _by_processes(cluster: str, library: str) -> Picture:
    series = {
        f"{size} MB": (
            list(_PROCESSES),
            [ratios(cluster, library, GATHER, (count,), (size,))[0] for count in _PROCESSES],
        )
        for size in SIZES
    }
    return lines(f"PCCL over {library}, all-gather, simulated", "processes", "speedup", series)


def _seconds(at: Times, system: str, collective: str, processes: int) -> Callable[[float], float]:
    """Seconds for any size, by a straight line between the logarithms of simulated ones."""

    def seconds(megabytes: float) -> float:
        place = math.log2(min(max(megabytes, SIZES[0]), SIZES[-1])) - math.log2(SIZES[0])
        low = min(int(place), len(SIZES) - 2)
        first, second = (at[system, collective, processes, SIZES[index]] for index in (low, low + 1))
        return first * (second / first) ** (place - low) * max(1.0, megabytes / SIZES[-1])

    return seconds


def zero_3(folder: Path) -> Found:
    """Figure 6.12: a step of ZeRO-3, 4M tokens: each layer's gathers and scatters by simulated times, behind its compute."""
    values: dict[str, Value] = {}
    pictures = {}
    for cluster, library, names, counts in (
        ("frontier", "RCCL", ("7B", "13B"), (128, 256, 512, 1024, 2048)),
        ("perlmutter", "NCCL", ("7B",), (256, 512, 1024)),
    ):
        where = {"perlmutter": "perlmutter-80gb"}.get(cluster, cluster)
        for name in names:
            steps = {
                system: [_zero_step(cluster, where, name, system, count) for count in counts]
                for system in (library, "PCCL")
            }
            for place, count in enumerate(counts):
                gain = less(steps["PCCL"][place], steps[library][place])
                values[f"{cluster.capitalize()} {count}, {name}"] = gain
            series = {system: (list(counts), found) for system, found in steps.items()}
            pictures[f"{cluster}_{name}"] = lines(
                f"ZeRO-3, {name} on {cluster.capitalize()}, simulated", "GPUs", "s", series
            )
    return Found(values, pictures)


def _zero_step(cluster: str, where: str, name: str, system: str, gpus: int) -> float:
    trained = {"7B": "gpt3-6.7b", "13B": "gpt3-13b"}[name]
    of = model.load(trained)
    assert isinstance(of, model.Transformer)
    plan = best(where, trained, gpus, 2048, fixed={"gx": 1, "gy": 1, "gdata": 1, "m": 1})
    compute = (plan.parts["compute"] + plan.parts["memory"]) / of.layers
    at, h = times(cluster), of.hidden
    linears = [2 * size * h * h / 1e6 for size in (3, 1, 4, 4)]
    gather, scatter = (sum(map(_seconds(at, system, collective, gpus), linears)) for collective in (GATHER, SCATTER))
    # Of four equal parts of compute forward is one, its repetition another, backward two.
    return of.layers * (max(compute / 4, gather) + max(3 * compute / 4, gather + scatter))


def messages(folder: Path) -> Found:
    """Figure 6.1: bytes of a whole gathered tensor, by framework, of a block of GPTs of 7B to 70B parameters in 16 bits, on the meta device."""
    models = {"7B": (4096, 32), "13B": (5120, 40), "30B": (7168, 56), "70B": (8192, 64)}
    by: dict[str, list[float]] = {"ZeRO-3": [], "FSDP": [], "AxoNN": []}
    for hidden, heads in models.values():
        with torch.device("meta"):
            network = GPT(GPTConfig(vocabulary=51200, context=2048, layers=1, heads=heads, hidden=hidden))
        linears = {id(one): one.weight.numel() for one in network.blocks.modules() if isinstance(one, nn.Linear)}
        by["ZeRO-3"] += [_MB * count for count in linears.values()]  # each matrix
        by["FSDP"].append(_MB * sum(one.numel() for one in network.blocks.parameters()))  # the block
        grid = Grid(NODE, 1, 2, 1)
        by["AxoNN"] += [  # what the ranks of z have of each matrix, with gx = 4
            _MB * one.elements * one.size
            for placed in placements(network, grid, gpt_plan(network.config))
            if id(placed.module) in linears
            for one in placed.collectives(2048, grid)
            if one.op == "all_gather" and one.axis == "z"
        ]
    every = [one for found in by.values() for one in found]
    inside = [16 <= one <= 1100 for one in every]
    values: dict[str, Value] = {
        "the smallest message": min(every),
        "the largest message": max(every),
        "messages of 16 MB to 1 GB": 100 * sum(inside) / len(inside),
    }
    series = {name: (list(range(1, len(found) + 1)), sorted(found)) for name, found in by.items()}
    return Found(values, {"sizes": lines("Gathered tensors, 7B to 70B", "number", "MB", series)})


def point_to_points(folder: Path) -> Found:
    """Figure 3.2: a message of 1 to 50 MB between two GPUs of Summit, in a node and between nodes."""
    on, sizes = machine.load("summit"), [2.0**power for power in range(20, 27)]
    series = {
        what: (sizes, [float(point_to_point(on, size, 2, near, False)) for size in sizes])
        for what, near in (("in a node", 2), ("between nodes", 1))
    }
    faster = all(a < b for a, b in zip(series["in a node"][1], series["between nodes"][1], strict=True))
    return Found({"in a node is faster": faster}, {"messages": lines("A message on Summit", "bytes", "s", series)})


EXPERIMENTS = {
    "collectives_libraries": Experiment(libraries, MODEL, 25),
    "collectives_frontier": Experiment(frontier, MODEL, 25),
    "collectives_perlmutter": Experiment(perlmutter, MODEL, 15),
    "collectives_halving": Experiment(halving, MODEL, 2),
    "collectives_zero_3": Experiment(zero_3, MODEL, 30),
    "collectives_messages": Experiment(messages, COUNTED, 1),
    "collectives_point_to_point": Experiment(point_to_points, MODEL, 1),
}
