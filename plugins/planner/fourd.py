"""Seconds and bytes of a step on 4D grids: AxoNN's collectives (`axonn`) beside compute, with what overlap hides.

All-gathers of weights hide behind the layer before (OAG), backward's sums behind the product of the weight's gradient (OAR),
reduce-scatters of gradients behind the rest of backward (ORS); sums of outputs and over data-parallel ranks are exposed. Gathered
weights are let go after forward and gathered again. Activations lie scattered, so attention and element-wise work are not repeated.
The optimizer's state is sharded over data-parallel ranks. `mode="paper"` is the published model: collectives alone, each once, at nominal bandwidths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from plugins.planner import work
from plugins.planner.axonn import (
    Communication,
    Floats,
    Grids,
    Repeats,
    bandwidths,
    communication,
    grids,
    layer_communication,
    linears,
    ranked,
    state_bytes,
)
from plugins.planner.machine import Machine
from plugins.planner.model import Transformer
from plugins.planner.search import Constraints, Found, GridPlan
from plugins.planner.space import divisors
from plugins.planner.step import Memory, Setting, Times
from plugins.planner.transformer import Mode
from plugins.planner.work import Number


@dataclass(frozen=True)
class Layer:
    """Seconds of one layer and micro-batch.

    Attributes:
        forward: (compute, waiting for memory) of forward.
        backward: the same of backward.
        products: of each linear's weight gradient, behind which a sum hides.
    """

    forward: tuple[Floats, Floats]
    backward: tuple[Floats, Floats]
    products: list[Floats]


def search(
    machine: Machine,
    model: Transformer,
    gpus: int,
    batch: int,
    mode: Mode = "default",
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
        constraints: which grids count, by gx, gy, gz, gdata and m.
        setting: how it is trained.
    """
    at, m = _with_microbatches(grids(model, gpus, batch), batch, mode)
    kept = _mask(at, m, constraints or Constraints())
    at, m = at.take(kept), m[kept]
    if not len(at):
        return Found([], [], 0, 0, 0)
    held = memory(model, at, m, batch, mode, setting)
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
    model: Transformer,
    at: Grids,
    m: Number,
    batch: int,
    mode: Mode = "default",
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
    tokens, none = batch * model.sequence, np.zeros(len(at))
    if mode == "paper":
        talked = communication(replace(machine, bandwidth_efficiency=1.0), model, at, tokens)
        return Times(none, none, talked.total - talked.data, talked.data, none, none), talked
    beta, count = bandwidths(machine, at), model.layers * m
    one = Repeats(gathers=2, gradient_bytes=2 * setting.kept)
    layer = layer_times(machine, model, at, batch / (at.gz * at.gdata * m))
    parts = [
        _with_latency(machine, at, layer_communication(linear, tokens / at.gdata / m, at, beta, one), linear.transposed)
        for linear in linears(model)
    ]
    exposed, passes = _exposed(layer, parts, setting.recompute), 2 if setting.recompute else 1
    talked = (parts[0] + parts[1] + parts[2] + parts[3]).times(count)
    talked = replace(talked, forward=passes * talked.forward, data=talked.data / m)
    compute, waiting = ((passes * layer.forward[i] + layer.backward[i]) * count for i in range(2))
    return Times(compute, waiting, exposed * count, talked.data, none, none), talked


def layer_times(machine: Machine, model: Transformer, at: Grids, samples: Floats) -> Layer:
    """Compute of one layer and micro-batch, by the roofline.

    Args:
        machine: where it runs.
        model: what is trained.
        at: the grids.
        samples: of a micro-batch, on one GPU's share of z and data.
    """
    rows = samples * model.sequence
    products = [
        work.matmul(rows, linear.k / over_k, linear.n / over_n)
        for linear in linears(model)
        for over_k, over_n in [(at.gx, at.gy) if linear.transposed else (at.gy, at.gx)]
    ]
    share = np.where(model.heads % (at.gx * at.gy) == 0, at.gx * at.gy, at.gx)
    kv_heads = samples * np.maximum(model.kv / share, 1)
    ratio = machine.tensor / machine.vector
    attention = work.attention(samples * model.heads / share, kv_heads, model.sequence, model.sequence, model.q, ratio)
    own, inner = rows / (at.gx * at.gy), rows * model.f / (at.gx * at.gy)
    outer = own * model.hidden
    vector = [work.bias(own, model.f), work.bias(own, model.hidden), work.bias(own, model.hidden)]
    vector += [work.gelu(inner), work.dropout(inner), work.dropout(outer), work.dropout(outer)]
    vector += [work.layer_norm(own, model.hidden), work.layer_norm(own, model.hidden)]
    forward, backward = np.zeros((2, len(at))), np.zeros((2, len(at)))
    for done, peak in [
        *((one, machine.tensor) for one in [*products, attention]),
        *((one, machine.vector) for one in vector),
    ]:
        forward += _roofline(machine, done.flops, done.moved, peak)
        backward += _roofline(machine, done.backward_flops, done.backward_moved, peak)
    gradients = [
        _roofline(machine, one.backward_flops, one.backward_moved, machine.tensor).sum(axis=0) / 2 for one in products
    ]
    return Layer((forward[0], forward[1]), (backward[0], backward[1]), gradients)


def memory(
    model: Transformer, at: Grids, m: Number, batch: int, mode: Mode = "default", setting: Setting | None = None
) -> Memory:
    """Bytes of a GPU. In the published model, only state counts, and data-parallel ranks repeat it.

    Args:
        model: what is trained.
        at: the grids.
        m: micro-batches of each.
        batch: samples of a step.
        mode: see `search`.
        setting: how it is trained.
    """
    setting = setting or Setting()
    if mode == "paper":
        two = state_bytes(model, at, 2.0)
        return Memory(two, two, state_bytes(model, at, 12.0), 0 * two)
    two, kept = state_bytes(model, at, 2.0), setting.kept
    largest = max(linear.k * linear.n for linear in linears(model))
    gathered = np.where(at.gz > 1, 2 * 2 * largest / (at.gx * at.gy), 0)
    rows = batch / (at.gz * at.gdata * m) * model.sequence
    e, f, heads = model.hidden, model.f, model.heads
    inputs = 2 * rows * (2 * e / at.gy + (heads * model.q + f) / at.gx)
    between = rows * (4 * e + 2 * e + 8 * e + 4 * heads + 2 * f + f) / (at.gx * at.gy)
    activations = model.layers * (inputs + between)
    if setting.recompute:
        activations = model.layers * 2 * rows * e / (at.gx * at.gy) + inputs + between
    index = kept * two if setting.sparsity else 0 * two
    optimizer = kept * state_bytes(model, at, 12.0) / at.gdata + index
    return Memory(two + gathered, kept * two, optimizer, activations)


def _exposed(layer: Layer, parts: list[Communication], recompute: bool) -> Floats:
    """Seconds of a layer's collectives that nothing hides; those over data-parallel ranks apart.

    With recomputation, forward runs twice, and gathers its weights each time; without, backward gathers them.
    """
    forward, backward = sum(layer.forward), sum(layer.backward)
    gather = sum(part.gather for part in parts) / 2
    exposed = np.maximum(gather - forward, 0) + sum(part.forward for part in parts)
    exposed = 2 * exposed if recompute else exposed
    hidden = np.zeros_like(forward)
    for part, product in zip(parts, layer.products, strict=True):
        behind = np.minimum(part.backward, product)
        exposed, hidden = exposed + part.backward - behind, hidden + behind
    later = (0 if recompute else gather) + sum(part.scatter for part in parts)
    return exposed + np.maximum(later - (backward - hidden), 0)


def _with_latency(machine: Machine, at: Grids, part: Communication, transposed: bool) -> Communication:
    """Latency besides: of a ring, a message for each further rank, twice in a sum; over data, the four linears of a layer share one."""
    steps: list[Floats] = []
    inner = np.ones(len(at))
    for size in at.axes:
        inner = inner * size
        near = np.clip(machine.domain // (inner // size), 1, size)  # of its ranks in a node
        recursive = machine.slow_latency * np.ceil(np.log2(size / near)) + machine.fast_latency * (near - 1)
        ring = (size - 1) * np.where(inner > machine.domain, machine.slow_latency, machine.fast_latency)
        steps.append((recursive if machine.collectives == "pccl" else ring).astype(np.float64))
    x, y, z, data = steps
    x, y = (y, x) if transposed else (x, y)
    return part + Communication(2 * z, z, 2 * y, 2 * x, 2 * data / 4)


def _roofline(machine: Machine, flops: Number, moved: Number, peak: float) -> Floats:
    compute = machine.flop_latency + flops / (machine.flop_efficiency * peak)
    return np.stack(np.broadcast_arrays(compute, np.maximum(moved / machine.memory_bandwidth - compute, 0)))


def _with_microbatches(at: Grids, batch: int, mode: Mode) -> tuple[Grids, np.ndarray]:
    """Each grid with every number of micro-batches that its samples divide into."""
    if mode == "paper":
        return at, np.ones(len(at), np.int64)
    counts = [divisors(int(batch // (gz * gdata))) for gz, gdata in zip(at.gz, at.gdata, strict=True)]
    index = np.repeat(np.arange(len(at)), [len(one) for one in counts])
    return at.take(index), np.array([m for one in counts for m in one], np.int64)


def _mask(at: Grids, m: np.ndarray, constraints: Constraints) -> np.ndarray:
    mask = np.ones(len(at), bool)
    for name, size in constraints.fixed.items():
        mask &= (m if name == "m" else getattr(at, name)) == size
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
        microbatches=int(m[i]),
        seconds=float(timed.total[i]) if timed else np.nan,
        parts=pick(timed),
        bytes=float(held.total[i]),
        holds=pick(held),
        collectives=pick(talked),
    )
