"""Sides that take turns, each on processes of its own: hosts have one set of groups a process."""

from __future__ import annotations

import gc
import statistics
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from axonn_plugins import processors
from axonn_plugins.cluster import Cluster
from axonn_plugins.cluster.launch import launch
from axonn_recipes.bench.rounds import check_losses, in_turns, over_ranks, slowest
from axonn_recipes.bench_tp.measure import Side
from axonn_recipes.bench_tp.memory import PeakMemory

Build = Callable[[Any, Any], Callable[[], Tensor]]
"""Makes a side's training step of a run's settings and its way; a step returns a loss, whose mean over all ranks is the batch's."""

_CHECKED_STEPS = 3


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


def compare(settings: Any, ways: Sequence[tuple[Side, Any]], build: Build, tolerance: float) -> list[Side]:
    """Launch every way in each round, in turns, and give the sides what was measured.

    Args:
        settings: of the run: a ClusterRun with `local` and `steps`.
        ways: each side, and the way that it is made of.
        build: makes its step on a rank.
        tolerance: largest relative difference of the first losses that rounding of fp32 explains.

    Raises:
        ConfigError: the sides do not compute the same losses.
    """
    sides = [side for side, _ in ways]
    with ExitStack() as stack:
        start = _starter(settings, stack)
        for number, (side, way) in in_turns(ways, settings.rounds):
            found: Found = start(_measure, settings, way, build, number == 0)[0]
            side.losses, side.memory = found.losses, side.memory or found.memory
            side.seconds.append(statistics.median(found.seconds))
            if number == 0 and all(one.losses for one in sides):
                check_losses(sides, tolerance, True, "leave one out")
    return sides


def unbuilt() -> Any:
    """Stands where a side of `axonn bench tp` has what builds it."""
    raise AssertionError("sides are built on ranks")


def _starter(settings: Any, stack: ExitStack) -> Callable[..., list[Any]]:
    if settings.local:
        return lambda function, *given: launch(function, settings.ranks, *given)
    cluster = stack.enter_context(Cluster(settings.nodes, settings.latency, settings.bandwidth))
    return lambda function, *given: cluster.launch(function, settings.ranks_per_node, *given)


def _measure(settings: Any, way: Any, build: Build, weighed: bool) -> Found:
    """The work of each rank: build a side, take its first steps, and time some more.

    What it holds is followed where it is weighed; such a step takes longer, and is not timed.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)
    processors.share_among(settings.ranks)
    dist.init_process_group(settings.wire)
    losses, memory = [], PeakMemory()
    with memory if weighed else ExitStack():
        step = build(settings, way)
        for number in range(_CHECKED_STEPS):
            if weighed and number == _CHECKED_STEPS - 1:
                gc.collect()
                memory.restart()
            losses += over_ranks([float(step())], dist.ReduceOp.SUM)
    seconds = [slowest(step) for _ in range(settings.steps)]
    most = int(over_ranks([memory.peak], dist.ReduceOp.MAX)[0])
    return Found([loss / settings.ranks for loss in losses], seconds, most)
