"""``axonn bench moe``: a HF or a Megatron mixture of experts, ours beside DeepSpeed's AutoEP and AutoTP or Megatron's folding."""

from __future__ import annotations

import gc
import importlib.util
import os
import statistics
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from axonn_plugins.cli.options import read
from axonn_plugins.cluster import Cluster
from axonn_plugins.cluster.launch import launch
from axonn_plugins.config import ConfigError
from axonn_recipes.bench.output import publish
from axonn_recipes.bench.rounds import check_losses, in_turns, over_ranks, say, slowest
from axonn_recipes.bench_moe import hf, mcore
from axonn_recipes.bench_moe.settings import Options, Settings, Way, described, resolve
from axonn_recipes.bench_tp.measure import Side
from axonn_recipes.bench_tp.memory import PeakMemory
from axonn_recipes.bench_tp.report import brief, brief_text
from axonn_recipes.runs import new_folder

TOLERANCE = 1e-4
"""Largest relative difference of the first losses that rounding of fp32 explains."""
_CHECKED_STEPS = 3
_BUILDERS: dict[str, Any] = {"hf": hf, "megatron": mcore}
_NEEDED = {"hf": "transformers", "megatron": "megatron"}


@dataclass
class Found:
    """The results of one launch of a side; the same on every rank.

    Attributes:
        losses: of the first steps.
        seconds: of each timed step, the slowest rank's.
        memory: most bytes of tensors that a rank held at once in a step.
    """

    losses: list[float]
    seconds: list[float]
    memory: int


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's, no cluster can be emulated here, or sides that do not compute the same.
    """
    options = read(Options, arguments, "axonn bench moe")
    settings = resolve(options)
    folder = new_folder(options.runs, options.name, "bench_moe")
    print(described(settings), end="\n\n", flush=True)
    if options.dry_run:
        return 0
    for package in ("deepspeed", _NEEDED[settings.model]):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"axonn bench moe --model {settings.model} needs {package}, which is not installed; install it"
            )
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    _BUILDERS[settings.model].load()
    numbers = brief(settings, compare(settings))
    publish(folder, numbers, brief_text(numbers))
    return 0


def compare(settings: Settings) -> list[Side]:
    """Run the sides in turns, each on processes of its own: hosts have one set of groups a process.

    Raises:
        ConfigError: the sides do not compute the same losses.
    """
    chosen = [(Side(settings.name(way), "ours" if way.ours else "peer", _nothing), way) for way in settings.ways]
    with ExitStack() as stack:
        start = _starter(settings, stack)
        for number, (side, way) in in_turns(chosen, settings.rounds):
            say(f"round {number + 1} of {settings.rounds}: {side.name}")
            found: Found = start(measure, settings, way, number == 0)[0]
            side.losses, side.memory = found.losses, side.memory or found.memory
            side.seconds.append(statistics.median(found.seconds))
            if number == 0 and len([one for one, _ in chosen if one.losses]) == len(chosen):
                check_losses([one for one, _ in chosen], TOLERANCE, True, "leave one out")
    return [side for side, _ in chosen]


def _nothing() -> Any:
    raise AssertionError("sides are built on ranks")


def _starter(settings: Settings, stack: ExitStack) -> Callable[..., list[Any]]:
    if settings.local:
        return lambda function, *given: launch(function, settings.ranks, *given)
    cluster = stack.enter_context(Cluster(settings.nodes, settings.latency, settings.bandwidth))
    return lambda function, *given: cluster.launch(function, settings.ranks_per_node, *given)


def measure(settings: Settings, way: Way, weighed: bool) -> Found:
    """The work of each rank: build a side, take its first steps, and time some more.

    Args:
        settings: the run.
        way: the side.
        weighed: follow what it holds; such a step takes longer, and is not timed.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.ranks))
    dist.init_process_group(settings.wire)
    losses, memory = [], PeakMemory()
    with memory if weighed else ExitStack():
        step = _BUILDERS[settings.model].build(settings, way)
        for number in range(_CHECKED_STEPS):
            if weighed and number == _CHECKED_STEPS - 1:
                gc.collect()
                memory.restart()
            losses += over_ranks([float(step())], dist.ReduceOp.SUM)
    seconds = [slowest(step) for _ in range(settings.steps)]
    most = int(over_ranks([memory.peak], dist.ReduceOp.MAX)[0])
    return Found([loss / settings.ranks for loss in losses], seconds, most)
