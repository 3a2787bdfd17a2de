"""The deal of ranks and samples in a plan, in the terms of those that run it."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_plugins.planner.search import AnyPlan, GridPlan


@dataclass(frozen=True)
class Split:
    """The deal of ranks and samples in a plan.

    Attributes:
        sequence: of z's ranks, or of 2D's n2, so many share the positions of each sample.
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
    sequence: int = 1


def split_of(plan: AnyPlan, batch: int) -> Split | None:
    """The deal of ranks and samples in a plan; 1D is a grid of x and data alone, 2D has Megatron's context parallelism besides.

    None for SUMMA, which nobody runs.
    """
    if isinstance(plan, GridPlan):
        samples = batch // (plan.gz // plan.sequence * plan.gdata * plan.microbatches)
        return Split(plan.gx, plan.gy, plan.gz, plan.gdata, plan.stages, samples, plan.microbatches, plan.sequence)
    if plan.strategy == "summa":
        return None
    return Split(plan.n1, 1, 1, plan.nd, plan.np, plan.bm, plan.microbatches, plan.n2)
