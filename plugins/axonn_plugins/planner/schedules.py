"""Pipeline schedules: what each waits, keeps, and asks of microbatches and stages.

Zero-bubble schedules (Qi et al. 2023, arXiv 2401.10241) do the products of weights' gradients apart from the rest of backward, and late, where
a stage would idle. F, B and W are a stage's seconds of a microbatch: forward, backward but for weights' gradients, and these. Ends of a step
are those of all stages, since gradients are clipped by one norm. The formulas equal what the orders of
torch.distributed.pipelining take (``tests/planner/test_schedules.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from axonn_plugins.planner.work import Number

Schedule = Literal["1f1b", "zb-h1", "zb-v"]


@dataclass(frozen=True)
class Kind:
    """A schedule.

    Attributes:
        idle: seconds that a stage waits for each further one, of F, B and W, where the model is in one part a stage.
        parts: of the model on each stage, where they are given; 0 for `Setting.interleave`.
        least: microbatches from which that holds, of a number of stages.
        torch: who runs it.
    """

    idle: Callable[[Number, Number, Number], Number]
    parts: int
    least: Callable[[Number], Number]
    torch: str = ""


SCHEDULES: dict[Schedule, Kind] = {
    "1f1b": Kind(lambda f, b, w: f + b + w, 0, lambda stages: 0 * stages),
    "zb-h1": Kind(
        lambda f, b, w: np.maximum(np.maximum(f + b - w, b), f),
        0,
        lambda stages: stages,
        "ScheduleInterleavedZeroBubble",
    ),
    "zb-v": Kind(
        lambda f, b, w: np.maximum(np.maximum(b / 2, b - w), f / 2),
        2,
        lambda stages: 2 * stages - 1,
        "ScheduleZBVZeroBubble",
    ),
}
"""One forward, one backward; as much memory as that, and a third of its bubble (ZB-H1); in a V of two parts, a sixth of it (ZB-V)."""


def parts_of(schedule: Schedule, interleave: int) -> int:
    """Parts of the model on each stage."""
    return SCHEDULES[schedule].parts or interleave


def bubble(
    schedule: Schedule, interleave: int, stages: Number, forward: Number, backward: Number, weights: Number
) -> Number:
    """Seconds of a step that a stage idles.

    Args:
        schedule: which.
        interleave: parts of the model on each stage, where the schedule leaves them open.
        stages: of the pipeline.
        forward: F, seconds of a stage and microbatch, messages included.
        backward: B and W, likewise.
        weights: W.
    """
    kind = SCHEDULES[schedule]
    return (stages - 1) * kind.idle(forward, backward - weights, weights) / (1 if kind.parts else interleave)


def in_flight(schedule: Schedule, interleave: int, stages: Number, microbatches: Number) -> Number:
    """Microbatches whose activations a stage keeps at most; interleaved 1F1B has (stages − 1)/(stages · interleave) more."""
    most = np.minimum(stages, microbatches)
    if schedule != "1f1b" or interleave == 1:
        return most
    return most * (1 + (stages - 1) / (stages * interleave))
