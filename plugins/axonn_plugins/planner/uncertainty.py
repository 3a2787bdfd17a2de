"""Uncertainty of a prediction: the errors of the collectives' formulas where they were measured, carried to a step.

Against 1,329 NCCL timings on Perlmutter the formulas err by a median of 3 to 5 % from 64 MB up with 2 or 4 GPUs a node, by 19 % with
one, and predict 40 to 50 % too little from 1 to 64 MB. The paper's whole model was 4 to 15 % off on five configurations of a GPT, and
2 to 26 % on a ViT, on 512 A100 (004, section IV).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from axonn_plugins.planner import calibration
from axonn_plugins.planner.axonn import Floats, Grids, Repeats, bandwidths, layer_communication
from axonn_plugins.planner.collectives import seconds
from axonn_plugins.planner.experts import layers
from axonn_plugins.planner.layers import Linear
from axonn_plugins.planner.machine import Machine
from axonn_plugins.planner.model import Model, Transformer
from axonn_plugins.planner.search import AnyPlan, GridPlan, Plan
from axonn_plugins.planner.transformer import Mode, local, parameters

LARGE = 64e6
"""Bytes from which the formulas are good."""
PERLMUTTER = "if collectives err as they did on Perlmutter"
WHOLE = {"gpt": (0.04, 0.15), "vit": (0.02, 0.26)}
"""Published errors of a step's time on 512 A100, by model."""


@dataclass(frozen=True)
class Range:
    """Seconds of a step, if the model errs as it, or its collectives, did when measured, and where that was."""

    low: float
    high: float
    source: str


def collective_error(volume: float, v: int) -> tuple[float, float]:
    """Shares by which a collective may take less and more than predicted.

    Args:
        volume: bytes of the full tensor.
        v: GPUs of its group in a domain.
    """
    if volume < LARGE:
        return 0.0, 1.0
    return (0.19, 0.19) if v == 1 else (0.05, 0.05)


def step_range(machine: Machine, model: Model, plan: AnyPlan, mode: Mode, batch: int) -> Range:
    """The range of a plan's seconds, from the errors of its collectives; hidden ones are taken to stay hidden.

    Those of 4D grids err as the machine's file says, else as those on Perlmutter, each by its size and its ranks in a node.

    Args:
        machine: where it runs.
        model: what is trained.
        plan: the configuration.
        mode: as it was searched.
        batch: samples of a step.
    """
    if mode == "calibrated" and (machine.device != "cpu" or machine.collective_error is None):
        return calibrated_range(plan.seconds)
    if not isinstance(plan, Plan):
        return _grid_range(machine, model, plan, batch)
    assert isinstance(model, Transformer)
    floats = [np.float64(value) for value in (plan.n1, plan.n2, plan.bm, plan.panels)]
    size = local(model, plan.strategy, mode, *floats)
    groups = {"n1": (plan.n1, plan.v1), "n2": (plan.n2, plan.v2)}
    predicted, less, more = 0.0, 0.0, 0.0
    of_layers = layers(model, plan.strategy, mode, size, 1.0, np.array(plan.nd))
    for part, operation in ((part, one) for part, several in of_layers for one in several):
        for collective in operation.forward + operation.backward:
            n, v = groups[collective.axis]
            if n > 1:
                each = part * float(seconds(machine, collective.kind, collective.volume, n, v))
                low, high = collective_error(float(collective.volume), v)
                predicted, less, more = predicted + each, less + low * each, more + high * each
    tensor = plan.parts["tensor"] * (1 + (plan.np - 1) / plan.microbatches) / (predicted or 1.0)
    weights = 2 * float(parameters(model, plan.strategy, size))
    low, high = collective_error(weights, plan.vd)
    network = plan.parts["pipeline"]
    return Range(
        plan.seconds - less * tensor - low * plan.parts["data"] - 0.19 * network,
        plan.seconds + more * tensor + high * plan.parts["data"] + 0.19 * network,
        PERLMUTTER,
    )


def calibrated_range(predicted: float) -> Range:
    """In which 80 % of the published seconds lay of systems that were left out of the fit (`fit.spread`)."""
    factor = math.exp(calibration.WITHIN * calibration.ours().spread)
    return Range(
        predicted / factor,
        predicted * factor,
        "if it is off as for four of five published steps of systems that are left out of the fit",
    )


def _grid_range(machine: Machine, model: Model, plan: GridPlan, batch: int) -> Range:
    if machine.collective_error is not None:
        spent, error = plan.parts["tensor"] + plan.parts["data"], machine.collective_error
        return Range(
            plan.seconds - min(error, 1.0) * spent,
            plan.seconds + error * spent,
            "if collectives err as this machine's file says",
        )
    samples = batch / plan.gdata / plan.microbatches
    # Seconds, and what may be less and more of them: of collectives of tensor parallelism, and of data parallelism.
    sums = np.zeros((2, 3))
    for block in model.blocks:
        for linear in block.linears:
            sums += block.count * _linear_errors(machine, linear, plan, samples)
    shares = sums[:, 1:] / np.maximum(sums[:, :1], 1e-300)
    less, more = np.array([plan.parts["tensor"], plan.parts["data"]]) @ shares
    return Range(plan.seconds - float(less), plan.seconds + float(more), PERLMUTTER)


def _linear_errors(machine: Machine, linear: Linear, plan: GridPlan, samples: float) -> Floats:
    """Seconds of one layer's collectives, and what may be less and more of them, as rows for tensor and data parallelism."""
    at = Grids(*(np.array([size]) for size in (plan.gx, plan.gy, plan.gz, plan.gdata)))
    inner, near = 1, {}
    for axis, size in zip("xyzd", (plan.gx, plan.gy, plan.gz, plan.gdata), strict=True):
        near[axis], inner = min(max(machine.domain // inner, 1), size), inner * size
    x, y = ("y", "x") if linear.transposed else ("x", "y")
    gx, gy = (plan.gy, plan.gx) if linear.transposed else (plan.gx, plan.gy)
    took = layer_communication(linear, samples, at, bandwidths(machine, at), Repeats(accumulation=1))
    weights = 2 * linear.weights / (gx * gy)
    outputs, inputs = (
        2 * samples * size / plan.gz for size in (linear.gives * linear.n / gx, linear.takes * linear.k / gy)
    )
    sums = np.zeros((2, 3))
    for part, seconds_taken, volume, axis in (
        (0, took.gather + took.scatter, weights, "z"),
        (0, took.forward, outputs, y),
        (0, took.backward, inputs, x),
        (1, took.data, weights / plan.gz, "d"),
    ):
        sums[part] += np.array([1.0, *collective_error(volume, near[axis])]) * float(seconds_taken[0])
    return sums
