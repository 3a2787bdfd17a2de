"""Seconds and bytes of a step on 4D grids: AxoNN's collectives (`axonn`) beside compute, with what overlap hides.

All-gathers of weights hide behind the layer before (OAG), backward's sums behind the product of the weight's gradient (OAR),
reduce-scatters of gradients behind the rest of backward (ORS); sums of outputs and over data-parallel ranks are exposed. Gathered
weights are let go after forward and gathered again, unless they are kept. Activations lie scattered, so attention and element-wise work are not repeated.
The optimizer's state is sharded over data-parallel ranks. `mode="paper"` is the published model: collectives alone, each once, at nominal bandwidths.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from axonn_plugins.planner.axonn import (
    Communication,
    Floats,
    Grids,
    Repeats,
    bandwidths,
    communication,
    grids,
    layer_communication,
    ranked,
    staged,
)
from axonn_plugins.planner.collectives import point_to_point, sum_of_shares
from axonn_plugins.planner.compute import Layer, layer_times
from axonn_plugins.planner.context import sharing
from axonn_plugins.planner.held import memory
from axonn_plugins.planner.kept import of_stage, share_kept
from axonn_plugins.planner.layers import Block
from axonn_plugins.planner.machine import Machine, calibrated
from axonn_plugins.planner.model import Model, Transformer
from axonn_plugins.planner.rates import in_precision
from axonn_plugins.planner.rest import offload_seconds, optimizer_seconds, output_seconds
from axonn_plugins.planner.search import Constraints, Found, GridPlan
from axonn_plugins.planner.setting import OVERLAPS, Setting
from axonn_plugins.planner.space import divisors
from axonn_plugins.planner.step import Memory, Times
from axonn_plugins.planner.transformer import Mode, local
from axonn_plugins.planner.work import Number


def search(
    machine: Machine,
    model: Model,
    gpus: int,
    batch: int,
    mode: Mode = "roofline",
    top: int = 10,
    constraints: Constraints | None = None,
    setting: Setting | None = None,
) -> Found:
    """Try every grid, and every number of micro-batches.

    Args:
        machine: where it runs; its domains are the nodes.
        model: what is trained.
        gpus: how many, all used.
        batch: samples of a step.
        mode: "paper" for collectives alone.
        top: how many grids are returned.
        constraints: which grids count, by gx, gy, gz, gdata, stages and m.
        setting: how it is trained.
    """
    machine = calibrated(machine, mode)
    constraints = constraints or Constraints()
    if mode != "calibrated" or not isinstance(model, Transformer):
        return _best(machine, model, grids(model, gpus, batch), batch, mode, top, constraints, setting)
    # More ranks than must share samples where they are asked for, or where nothing fits without.
    asked = "sequence" in constraints.fixed
    found = _best(machine, model, staged(model, gpus, batch, asked), batch, mode, top, constraints, setting)
    if found.best or asked:
        return found
    return _best(machine, model, staged(model, gpus, batch, True), batch, mode, top, constraints, setting)


def _best(
    machine: Machine,
    model: Model,
    at: Grids,
    batch: int,
    mode: Mode,
    top: int,
    constraints: Constraints,
    setting: Setting | None,
) -> Found:
    """The best of these grids."""
    at, m = _with_microbatches(at, batch, mode)
    kept = _mask(at, m, constraints)
    at, m = at.take(kept), m[kept]
    if not len(at):
        return Found([], [], 0, 0, 0)
    held = memory(model, at, m, batch, mode, setting, machine)
    fits = held.total <= machine.memory
    lacking = np.flatnonzero(~fits)
    lacking = lacking[np.argsort(held.total[lacking], kind="stable")][:top]
    nearest = [_plan(at, m, held, None, None, int(i)) for i in lacking]
    if not fits.any():
        return Found([], nearest, len(at), 0, 0)
    timed, talked = times(machine, model, at, m, batch, mode, setting)
    index = np.flatnonzero(fits)
    order = index[ranked(at.take(index), timed.total[index])][:top]
    return Found([_plan(at, m, held, timed, talked, int(i)) for i in order], nearest, len(at), len(index), len(index))


def times(
    machine: Machine,
    model: Model,
    at: Grids,
    m: Number,
    batch: int,
    mode: Mode = "roofline",
    setting: Setting | None = None,
) -> tuple[Times, Communication]:
    """Seconds of a step by part, and of its collectives whether hidden or not.

    Args:
        machine: where it runs.
        model: what is trained.
        at: the grids.
        m: micro-batches of each.
        batch: samples of a step.
        mode: "paper" for collectives alone.
        setting: how it is trained.
    """
    setting = setting or Setting()
    none = np.zeros(len(at))
    if mode == "paper":
        talked = communication(replace(machine, bandwidth_efficiency=1.0), model, at, batch)
        return Times(none, none, talked.total - talked.data, talked.data, none, none), talked
    machine = in_precision(machine, setting)
    share = 1.0 if machine.calibration is None else machine.calibration.hidden
    compute, waiting, exposed, passes = none, none, none, 2 if setting.recompute else 1
    talked, stage = Communication(none, none, none, none, none), of_stage(model, at)
    gathers = 2 - share_kept(model, at, setting)
    for block in model.blocks:
        count = block.count * stage * m
        layer = layer_times(machine, block, at, batch / (at.gz * at.gdata * m))
        parts = _communication(machine, block, at, batch / at.gdata / m, setting, gathers)
        for part in parts:
            talked = talked + part.times(count)
        compute, waiting = (
            spent + (passes * layer.forward[i] + layer.backward[i]) * count
            for i, spent in enumerate((compute, waiting))
        )
        exposed = exposed + _exposed(layer, parts, setting, share, gathers) * count
        if at.shared is not None and block.attention is not None:
            samples = batch / (at.gz * at.gdata * m)
            forward, backward = sharing(machine, block.attention, at, samples, setting.sharing)
            exposed = exposed + (passes * forward + backward) * count
    talked = replace(talked, forward=passes * talked.forward, data=talked.data / m)
    if machine.calibration is not None and isinstance(model, Transformer):
        head, optimizer = _ends(machine, model, at, batch / (at.gz * at.gdata * m), setting)
        compute, waiting = compute + m * head[0], waiting + m * head[1] + optimizer
    pipeline = bubble = none
    if at.stages is not None:
        first = model.blocks[0].linears[0]
        message = 2 * batch / (at.gz * at.gdata * m) * first.takes * first.k / (at.gx * at.gy)
        near = np.clip(machine.domain // (at.gpus // at.stages), 1, at.stages)
        pipeline = none + 2 * m * point_to_point(machine, message, at.stages, near, False)
        bubble = (at.stages - 1) * (compute + waiting + exposed + pipeline) / m
    return Times(compute, waiting, exposed, talked.data, pipeline, bubble), talked


def _ends(
    machine: Machine, model: Transformer, at: Grids, samples: Floats, setting: Setting
) -> tuple[tuple[Number, Number], Number]:
    """Seconds of a micro-batch's output layer and loss (compute, waiting for memory), and of the optimizer's step."""
    plane, one = (at.gx * at.gy).astype(np.float64), np.ones(len(at))
    size = local(model, "1d", "roofline", plane, one, samples, one)
    own = setting.kept * model.parameters / (plane * at.gz * at.gdata * at.depth)
    visits = offload_seconds(machine, own) if setting.offload else 0.0
    return output_seconds(machine, model, size), optimizer_seconds(machine, own) + visits


def _exposed(layer: Layer, parts: list[Communication], setting: Setting, share: float, gathers: Floats) -> Floats:
    """Seconds of a layer's collectives that nothing hides; those over data-parallel ranks apart. Weights are gathered `gathers` times on average.

    With recomputation, forward runs twice, and gathers its weights each time if they are not kept; without, backward gathers those that are not.
    """
    forward, backward = sum(layer.forward), sum(layer.backward)
    passes = 2 if setting.recompute else 1
    gather = sum(part.gather for part in parts) / gathers
    hides = {name: share * (name in setting.overlap) for name in OVERLAPS}
    forward_gathers = gathers if setting.recompute else 1
    ahead = hides["OAG"] * gather
    exposed = forward_gathers * (gather - ahead + np.maximum(ahead - forward, 0))
    exposed = exposed + passes * sum(part.forward for part in parts)
    hidden = np.zeros_like(forward)
    for part, product in zip(parts, layer.products, strict=True):
        behind = np.minimum(hides["OAR"] * part.backward, product)
        exposed, hidden = exposed + part.backward - behind, hidden + behind
    later = {"OAG": 0 if setting.recompute else (gathers - 1) * gather, "ORS": sum(part.scatter for part in parts)}
    at_once = sum((1 - hides[name]) * spent for name, spent in later.items())
    hiding = sum(hides[name] * spent for name, spent in later.items())
    return exposed + at_once + np.maximum(hiding - (backward - hidden), 0)


def _communication(
    machine: Machine, block: Block, at: Grids, samples: Floats, setting: Setting, gathers: Floats
) -> list[Communication]:
    """Communication of each linear of a block and micro-batch, `samples` of a data-parallel group."""
    # Training sums weights' gradients in 4 bytes (of float32, whose bandwidths count half, 2), and a block's weights in one collective;
    # the published model has 2, and each its own.
    reached, count = machine.calibration is not None, len(block.linears)
    one = Repeats(
        gathers=gathers,
        gradient_bytes=2 * setting.kept,
        scatter_bytes=4 if reached and not setting.float32 else 2,
    )
    beta, share, scatter = bandwidths(machine, at), (1 / count if reached else 1.0, 1 / count), machine.reduce_scatter
    shares = sum_of_shares(machine, at.gz, np.clip(machine.domain // (at.gx * at.gy), 1, at.gz))
    parts = [
        _with_latency(
            machine, at, layer_communication(linear, samples, at, beta, one), linear.transposed, share, gathers
        )
        for linear in block.linears
    ]
    # In the scattered layout a sum is a reduce-scatter and an all-gather.
    return [
        replace(
            part,
            scatter=shares * part.scatter,
            forward=(1 + scatter) / 2 * part.forward,
            backward=(1 + scatter) / 2 * part.backward,
        )
        for part in parts
    ]


def _with_latency(
    machine: Machine, at: Grids, part: Communication, transposed: bool, shares: tuple[float, float], gathers: Floats
) -> Communication:
    """Latency besides: of a ring, a message for each further rank, twice in a sum; over z and data a linear has shares of one."""
    steps: list[Floats] = []
    inner = np.ones(len(at))
    for size in at.axes:
        inner = inner * size
        near = np.clip(machine.domain // (inner // size), 1, size)  # of its ranks in a node
        recursive = machine.slow_latency * np.ceil(np.log2(size / near)) + machine.fast_latency * (near - 1)
        slow = (size / near - 1) * machine.slow_latency + (size - size / near) * machine.fast_latency
        plain = (size - 1) * np.where(inner > machine.domain, machine.slow_latency, machine.fast_latency)
        ring = plain if machine.calibration is None else slow
        steps.append((recursive if machine.collectives == "pccl" else ring) + machine.call * (size > 1))
    x, y, z, data = steps
    x, y = (y, x) if transposed else (x, y)
    return part + Communication(gathers * z * shares[0], z * shares[0], 2 * y, 2 * x, 2 * data * shares[1])


def _with_microbatches(at: Grids, batch: int, mode: Mode) -> tuple[Grids, np.ndarray]:
    """Each grid with every number of micro-batches that its samples divide into."""
    if mode == "paper":
        return at, np.ones(len(at), np.int64)
    counts = [divisors(int(samples)) for samples in batch // (at.gz // at.sequence * at.gdata)]
    index = np.repeat(np.arange(len(at)), [len(one) for one in counts])
    return at.take(index), np.array([m for one in counts for m in one], np.int64)


def _mask(at: Grids, m: np.ndarray, constraints: Constraints) -> np.ndarray:
    mask = np.ones(len(at), bool)
    for name, size in constraints.fixed.items():
        mask &= (m if name == "m" else at.depth if name == "stages" else getattr(at, name)) == size
    return mask


def _plan(
    at: Grids, m: np.ndarray, held: Memory, timed: Times | None, talked: Communication | None, i: int
) -> GridPlan:
    pick = lambda one: {} if one is None else {name: float(values[i]) for name, values in vars(one).items()}  # noqa: E731
    return GridPlan(
        gx=int(at.gx[i]),
        gy=int(at.gy[i]),
        gz=int(at.gz[i]),
        gdata=int(at.gdata[i]),
        stages=int(at.depth[i]),
        sequence=int(at.sequence[i]),
        microbatches=int(m[i]),
        seconds=float(timed.total[i]) if timed else np.nan,
        parts=pick(timed),
        bytes=float(held.total[i]),
        holds=pick(held),
        collectives=pick(talked),
    )
