"""How far off a prediction may be: what the collectives' formulas missed by when they were measured, carried to a step.

Against 1,329 NCCL timings on Perlmutter the formulas err by a median of 3 to 5 % from 64 MB up with 2 or 4 GPUs a node, by 19 % with
one, and predict 40 to 50 % too little from 1 to 64 MB. The paper's whole model was 4 to 15 % off on five configurations of a GPT, and
2 to 26 % on a ViT, on 512 A100 (004, section IV).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plugins.planner.collectives import seconds
from plugins.planner.machine import Machine
from plugins.planner.model import Transformer
from plugins.planner.search import AnyPlan, Plan
from plugins.planner.transformer import Mode, local, operations, parameters

LARGE = 64e6
"""Bytes from which the formulas are good."""
WHOLE = {"gpt": (0.04, 0.15), "vit": (0.02, 0.26)}
"""Published errors of a step's time on 512 A100, by model."""


@dataclass(frozen=True)
class Range:
    """Seconds of a step, if collectives err as they did when measured."""

    low: float
    high: float


def collective_error(volume: float, v: int) -> tuple[float, float]:
    """By which shares a collective may take less and more than predicted.

    Args:
        volume: bytes of the full tensor.
        v: GPUs of its group in a domain.
    """
    if volume < LARGE:
        return 0.0, 1.0
    return (0.19, 0.19) if v == 1 else (0.05, 0.05)


def step_range(machine: Machine, model: Transformer, plan: AnyPlan, mode: Mode) -> Range:
    """The range of a plan's seconds, from the errors of its collectives; hidden ones are taken to stay hidden.

    Those of 4D grids, whose formulas were published with ranks alone, are taken to err as the machine's file says, else as those with one GPU a node.
    """
    if not isinstance(plan, Plan):
        error = machine.collective_error * (plan.parts["tensor"] + plan.parts["data"])
        return Range(plan.seconds - error, plan.seconds + error)
    floats = [np.float64(value) for value in (plan.n1, plan.n2, plan.bm, plan.panels)]
    size = local(model, plan.strategy, mode, *floats)
    groups = {"n1": (plan.n1, plan.v1), "n2": (plan.n2, plan.v2)}
    predicted, less, more = 0.0, 0.0, 0.0
    for operation in operations(model, plan.strategy, mode, size, 1.0):
        for collective in operation.forward + operation.backward:
            n, v = groups[collective.axis]
            if n > 1:
                each = float(seconds(machine, collective.kind, collective.volume, n, v))
                low, high = collective_error(float(collective.volume), v)
                predicted, less, more = predicted + each, less + low * each, more + high * each
    tensor = plan.parts["tensor"] * (1 + (plan.np - 1) / plan.microbatches) / (predicted or 1.0)
    weights = 2 * float(parameters(model, plan.strategy, size))
    low, high = collective_error(weights, plan.vd)
    network = plan.parts["pipeline"]
    return Range(
        plan.seconds - less * tensor - low * plan.parts["data"] - 0.19 * network,
        plan.seconds + more * tensor + high * plan.parts["data"] + 0.19 * network,
    )
