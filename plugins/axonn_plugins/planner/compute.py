"""Compute of a 4D grid's GPU, a block at a time: seconds by the roofline, and bytes that forward keeps for backward."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from axonn_plugins.planner import work
from axonn_plugins.planner.axonn import Floats, Grids, expert_ranks
from axonn_plugins.planner.layers import Attention, Between, Block, Linear, Scan, remade
from axonn_plugins.planner.machine import Machine
from axonn_plugins.planner.rates import Unit, spent, vector_cost


@dataclass(frozen=True)
class Layer:
    """Seconds of one block and micro-batch.

    Attributes:
        forward: (compute, waiting for memory) of forward.
        backward: the same of backward.
        products: of each linear's weight gradient, behind which a sum hides.
    """

    forward: tuple[Floats, Floats]
    backward: tuple[Floats, Floats]
    products: list[Floats]


def layer_times(machine: Machine, block: Block, at: Grids, samples: Floats) -> Layer:
    """Compute of one block and micro-batch, by the roofline.

    Args:
        machine: where it runs.
        block: what is computed.
        at: the grids.
        samples: of a micro-batch, on one GPU's share of z and data.
    """
    products = [_product(linear, at, samples) for linear in block.linears]
    attention = [] if block.attention is None else [attended(machine, block.attention, at, samples)]
    attention += [] if block.scan is None else [_scanned(block.scan, at, samples)]
    reached = machine.calibration is not None
    vector = [one for each in block.between for one in _vector_work(each, samples / (at.gx * at.gy), reached)]
    none = np.zeros(len(at))
    forward, backward = np.zeros((2, len(at))), np.zeros((2, len(at)))
    units: list[tuple[Unit, list[work.Work]]] = [("tensor", products), ("attention", attention), ("vector", vector)]
    for unit, several in units:
        for done in several:
            forward += np.stack(np.broadcast_arrays(*spent(machine, unit, done.flops, done.moved)))
            backward += np.stack(
                np.broadcast_arrays(*spent(machine, unit, done.backward_flops, done.backward_moved, True))
            )
    gradients = [
        none + sum(spent(machine, "tensor", one.backward_flops, one.backward_moved, True)) / 2 for one in products
    ]
    return Layer((forward[0], forward[1]), (backward[0], backward[1]), gradients)


def stored(block: Block, at: Grids, samples: Floats, again: bool) -> Floats:
    """Bytes that one block keeps for backward: its linears' inputs, which one axis splits, and the rest, which two do.

    Args:
        block: what is kept of.
        at: the grids.
        samples: of a micro-batch, on one GPU's share of z and data.
        again: whether backward makes again what is cheap (`layers.remade`).
    """
    plane, gated = at.gx * at.gy, any(one.kind == "gate" for one in block.between)
    between = [one for one in block.between if not (again and remade(one.kind, gated))]
    linears = [one for one in block.linears if not (again and remade(one.name, gated))]
    kept = sum((_between(one, samples).stored for one in between), 0 * samples)
    if block.attention is not None:
        of = block.attention
        heads, kv_heads = samples * of.heads, samples * of.kv_heads
        kept = kept + work.attention(heads, kv_heads, of.positions, of.positions, of.width, 1.0, of.value_width).stored
    scanned = 0.0 if block.scan is None else _scanned(block.scan, at, samples).stored
    inputs = sum(2 * samples * one.takes * one.k / (at.gx if one.transposed else at.gy) for one in linears)
    return inputs + kept / plane + scanned


def head_ranks(attention: Attention, at: Grids) -> Floats:
    """Ranks among which heads are dealt out: of x and y, or of x alone where they do not divide."""
    return np.where(attention.heads % (at.gx * at.gy) == 0, at.gx * at.gy, at.gx)


def attended(machine: Machine, attention: Attention, at: Grids, samples: Floats) -> work.Work:
    """One GPU's attention, of its share of the positions where ranks share a sample."""
    share, whole = head_ranks(attention, at), samples * at.sequence
    heads, kv_heads = whole * attention.heads / share, whole * np.maximum(attention.kv_heads / share, 1)
    return work.attention(
        heads,
        kv_heads,
        attention.positions / at.sequence,
        attention.positions,
        attention.width,
        vector_cost(machine),
        attention.value_width,
        causal=machine.calibration is not None,
    )


def _scanned(scan: Scan, at: Grids, samples: Floats) -> work.Work:
    """One GPU's share of a mixer between its matrices, dealt out by heads as attention is."""
    ranks = np.where(scan.heads % (at.gx * at.gy) == 0, at.gx * at.gy, at.gx)
    return work.scan(samples * scan.positions, scan.gives / ranks, scan.takes / ranks, scan.state, scan.chunk)


def _vector_work(one: Between, samples: Floats, fused: bool) -> list[work.Work]:
    """Work of an operation between products; fused, biases and dropout are part of a neighbour, and each norm comes with a residual sum."""
    if not fused:
        return [_between(one, samples)]
    if one.kind in ("bias", "dropout"):
        return []
    sums = [work.residual(samples * one.positions * one.width)] if one.kind == "norm" else []
    return [_between(one, samples), *sums]


def _between(one: Between, samples: Floats) -> work.Work:
    rows = samples * one.positions
    if one.kind == "bias":
        return work.bias(rows, one.width)
    if one.kind == "norm":
        return work.layer_norm(rows, one.width)
    of = {"activation": work.gelu, "gate": work.swiglu, "dropout": work.dropout}[one.kind]
    return of(rows * one.width)


def _product(linear: Linear, at: Grids, samples: Floats) -> work.Work:
    """A convolution is the product that it would be with its input unfolded, which is not written to memory.

    Experts, which data-parallel ranks share out, are so many products of a part of the positions each.
    """
    over_k, over_n = (at.gx, at.gy) if linear.transposed else (at.gy, at.gx)
    here = linear.copies / expert_ranks(linear, at)
    done = work.matmul(samples * linear.gives / here, linear.k * linear.kernel / over_k, linear.n / over_n)
    taken, given = samples * linear.takes * linear.k / over_k, samples * linear.gives * linear.n / over_n
    moved = 2 * (taken + given + linear.weights / (over_k * over_n) / expert_ranks(linear, at))
    return replace(
        done,
        flops=here * done.flops,
        moved=moved,
        backward_flops=here * done.backward_flops,
        backward_moved=2 * moved,
        stored=here * done.stored,
    )
