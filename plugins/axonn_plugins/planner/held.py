"""Bytes that a GPU of a 4D grid holds, by part."""

from __future__ import annotations

from functools import reduce

import numpy as np

from axonn_plugins.planner.axonn import Floats, Grids, expert_ranks, state_bytes
from axonn_plugins.planner.compute import stored
from axonn_plugins.planner.context import room
from axonn_plugins.planner.kept import of_stage, share_kept
from axonn_plugins.planner.machine import Machine
from axonn_plugins.planner.model import Model, Transformer
from axonn_plugins.planner.setting import Setting
from axonn_plugins.planner.step import Memory, fullest_stage
from axonn_plugins.planner.transformer import Mode
from axonn_plugins.planner.work import Number


def memory(
    model: Model,
    at: Grids,
    m: Number,
    batch: int,
    mode: Mode = "roofline",
    setting: Setting | None = None,
    machine: Machine | None = None,
) -> Memory:
    """Bytes of a GPU. In the published model, only state counts, and data-parallel ranks repeat it.

    Args:
        model: what is trained.
        at: the grids.
        m: micro-batches of each.
        batch: samples of a step.
        mode: see `fourd.search`.
        setting: how it is trained.
        machine: on which ranks that share sequences take the fastest way; None: keys and values count as gathered.
    """
    setting = setting or Setting()
    if mode == "paper":
        two = state_bytes(model, at, 2.0)
        return Memory(two, two, state_bytes(model, at, 12.0), 0 * two)
    element, left, shards = setting.element, setting.kept, at.gx * at.gy * at.gz
    held, trained = (
        _of_fullest(model, at, state_bytes(model, at, 1.0) * shards),
        _of_fullest(model, at, model.parameters),
    )
    of_linears = [linear.weights / expert_ranks(linear, at) for block in model.blocks for linear in block.linears]
    keep = share_kept(model, at, setting)
    at_once = np.where(keep < 1, np.maximum(keep * held, 2 * reduce(np.maximum, of_linears)), held)
    gathered = np.where(at.gz > 1, element * at_once / (at.gx * at.gy), 0)
    samples = batch / (at.gz * at.gdata * m)
    each = [stored(block, at, samples, mode == "calibrated") for block in model.blocks]
    most = at.depth if setting.in_flight is None else np.where(at.depth > 1, setting.in_flight, 1)
    in_flight = of_stage(model, at) * np.minimum(most, m)
    activations = in_flight * reduce(np.add, [block.count * one for block, one in zip(model.blocks, each, strict=True)])
    if setting.recompute:
        kept_inputs = sum(block.count * block.linears[0].takes * block.linears[0].k for block in model.blocks)
        activations = 2 * in_flight * samples * kept_inputs / (at.gx * at.gy) + reduce(np.maximum, each)
    # What comes of the others' keys and values, and goes back as gradients, of one layer at a time.
    attention = [block.attention for block in model.blocks if block.attention is not None]
    travelling = [room(machine, one, at, samples, setting) for one in attention]
    activations = element / 2 * (activations + reduce(np.maximum, travelling, 0 * activations))
    index = left * 2 * held / shards if setting.sparsity else 0 * held
    optimizer = left * setting.states * trained / shards / at.gdata + index
    weights = element * held / shards
    return Memory(weights + gathered, left * weights, optimizer, activations)


def _of_fullest(model: Model, at: Grids, parameters: Number) -> Floats:
    """Parameters of the stage that has most, of so many in all."""
    if not isinstance(model, Transformer):
        return parameters + np.zeros(len(at))
    outside = (1 + model.untied) * model.vocabulary * model.hidden + max(model.other, 0)
    return np.asarray(fullest_stage(model, at.depth, parameters - outside))
