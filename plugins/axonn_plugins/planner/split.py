"""How a plan deals out ranks and samples, in the terms of those that run it."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_plugins.planner.search import AnyPlan, GridPlan


@dataclass(frozen=True)
class Split:
    """How a plan deals out ranks and samples.

    Attributes:
        stages: of a pipeline.
        microbatch: samples of a rank at a time.
        accumulation: microbatches of a step.
    """

    gx: int
    gy: int
    gz: int
    gdata: int
    stages: int
    microbatch: int
    accumulation: int


def split_of(plan: AnyPlan, batch: int) -> Split | None:
    """How a plan deals out ranks and samples; 1D is a grid of x and data alone. None for what nobody runs, 2D and SUMMA."""
    if isinstance(plan, GridPlan):
        samples = batch // (plan.gz * plan.gdata * plan.microbatches)
        return Split(plan.gx, plan.gy, plan.gz, plan.gdata, 1, samples, plan.microbatches)
    return Split(plan.n1, 1, 1, plan.nd, plan.np, plan.bm, plan.microbatches) if plan.strategy == "1d" else None
