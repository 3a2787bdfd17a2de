"""The work of each rank for Figure 3.6: the bucketed optimizer's all-reduces, its updates, and one under the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from axonn_plugins.pipeline.bucketed_optimizer import BucketedOptimizer
from axonn_recipes.bench.rounds import in_turns, slowest
from axonn_recipes.bench_pipeline.measure import prepare
from axonn_recipes.bench_pipeline.settings import Settings

FACTORS = (1, 2, 4, 8, 16)
_SIDE = 1000  # a parameter has so many columns


@dataclass
class Overlap:
    """Seconds of both phases for one coarsening factor.

    Attributes:
        coarsening: buckets in one all-reduce.
        reduce: seconds of the all-reduces alone, by round.
        update: of the updates alone.
        after: of the all-reduces, then the updates.
        together: of both, overlapped.
    """

    coarsening: int
    reduce: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    together: list[float] = field(default_factory=list)


def measure(settings: Settings) -> list[Overlap]:
    """Time both phases for each factor; every rank calls it, and has the result."""
    prepare(settings)
    torch.manual_seed(0)
    rows = settings.parameters // 4 // _SIDE
    parameters = [nn.Parameter(torch.randn(rows, _SIDE, dtype=torch.bfloat16)) for _ in range(4)]
    gradients = [torch.randn_like(parameter) for parameter in parameters]
    optimizer = BucketedOptimizer(
        lambda groups: torch.optim.AdamW(groups, lr=1e-3, fused=True),
        parameters,
        settings.bucket_size,
        group=dist.group.WORLD,
    )
    made = [Overlap(factor) for factor in FACTORS]

    def in_turn() -> None:
        optimizer.reduce()
        optimizer.step()

    phases: dict[str, Callable[[], Any]] = {
        "reduce": optimizer.reduce,
        "update": optimizer.step,  # of what was just reduced
        "after": in_turn,
        "together": optimizer.step,
    }
    for number, found in in_turns(made, settings.rounds + 1):
        optimizer.coarsening = found.coarsening
        for name, phase in phases.items():
            if name != "update":
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient.clone()
            seconds = slowest(phase)
            if number:  # the first round makes the state
                getattr(found, name).append(seconds)
    return made


def hidden(found: Overlap) -> list[float]:
    """The share of the shorter phase that the overlap hides, by round: 1 if both together take as long as the longer."""
    rounds = zip(found.reduce, found.update, found.together, strict=True)
    return [(reduce + update - together) / min(reduce, update) for reduce, update, together in rounds]
