"""AxoNN's communication model (000, equations 5.1 to 5.7; 003, section V): seconds that a 4D grid's collectives take.

Rows of an activation, m, are split over z, those of a data-parallel group; k features over y, n over x; weights over z, too. The
forward sum is over y, the backward sum over x; a transposed layer swaps x and y. Axes lie innermost first: x, y, z, data.
Everything is a pure function of arrays of grids.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import add

import numpy as np
import numpy.typing as npt

from axonn_plugins.planner.collectives import reached
from axonn_plugins.planner.layers import Linear
from axonn_plugins.planner.machine import Machine
from axonn_plugins.planner.model import Model, Transformer
from axonn_plugins.planner.space import divisors, factorizations
from axonn_plugins.planner.work import Number

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Grids:
    """4D grids, an array for each axis, innermost first.

    Attributes:
        stages: of a pipeline, each of which has such a grid; None for one.
        shared: neighbours along z that share the positions of each sample; None for one.
    """

    gx: npt.NDArray[np.int64]
    gy: npt.NDArray[np.int64]
    gz: npt.NDArray[np.int64]
    gdata: npt.NDArray[np.int64]
    stages: npt.NDArray[np.int64] | None = None
    shared: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.gx)

    @property
    def axes(self) -> tuple[npt.NDArray[np.int64], ...]:
        """Sizes of all four axes."""
        return self.gx, self.gy, self.gz, self.gdata

    @property
    def depth(self) -> npt.NDArray[np.int64]:
        """Stages."""
        return np.ones(len(self), np.int64) if self.stages is None else self.stages

    @property
    def sequence(self) -> npt.NDArray[np.int64]:
        """Ranks that share a sample."""
        return np.ones(len(self), np.int64) if self.shared is None else self.shared

    @property
    def gpus(self) -> npt.NDArray[np.int64]:
        """GPUs of all axes and stages."""
        return self.gx * self.gy * self.gz * self.gdata * self.depth

    def take(self, chosen: npt.NDArray) -> Grids:
        """Some of them, by index or mask."""
        stages, shared = (None if one is None else one[chosen] for one in (self.stages, self.shared))
        return Grids(self.gx[chosen], self.gy[chosen], self.gz[chosen], self.gdata[chosen], stages, shared)


@dataclass(frozen=True)
class Bandwidths:
    """Bytes a second of a ring along each axis."""

    x: Floats
    y: Floats
    z: Floats
    data: Floats


@dataclass(frozen=True)
class Repeats:
    """Number of times that a layer's collectives run in a step.

    Attributes:
        gathers: of weights: 1, or 2 where activation checkpointing runs forward again and gathered weights are not kept.
        sums: of outputs, likewise.
        accumulation: micro-batches of a step; weights are gathered and their gradients scattered for each.
        gradient_bytes: of an element that is summed over data-parallel ranks.
        scatter_bytes: of an element of a weight's gradient that is summed over z.
    """

    gathers: Number = 1
    sums: int = 1
    accumulation: Number = 1
    gradient_bytes: float = 2
    scatter_bytes: float = 2


@dataclass(frozen=True)
class Communication:
    """Seconds of a step's collectives: equations 5.1 to 5.5, in their order."""

    gather: Floats
    scatter: Floats
    forward: Floats
    backward: Floats
    data: Floats

    @property
    def total(self) -> Floats:
        """Equation 5.6."""
        return self.gather + self.scatter + self.forward + self.backward + self.data

    def __add__(self, other: Communication) -> Communication:
        return Communication(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def times(self, count: Number) -> Communication:
        """Seconds of so many layers."""
        return Communication(*(getattr(self, one.name) * count for one in fields(self)))


def grids(model: Model, gpus: int, batch: int | None = None) -> Grids:
    """Every grid of so many GPUs that divides the model's heads and features, and a step's samples.

    Args:
        model: what is trained.
        gpus: gx · gy · gz · gdata.
        batch: samples of a step, which z and data split; None for any.
    """
    table = np.array(factorizations(gpus, 4), np.int64).T
    gx, gy, gz, gdata = table
    features, heads = model.divides
    fits = heads % gx == 0
    if batch is not None:
        fits &= batch % (gz * gdata) == 0
    if isinstance(model, Transformer):  # heads of keys and values are split, or each is repeated equally often
        fits &= (model.kv % gx == 0) | (gx % model.kv == 0)
    for size in features:
        fits &= (size % gx == 0) & (size % gy == 0)
    return Grids(*table[:, fits])


def staged(model: Transformer, gpus: int, batch: int, every: bool = False) -> Grids:
    """Every number of stages that each have a layer, and every grid of the rest of the GPUs, whose ranks of z may share samples.

    Args:
        model: what is trained.
        gpus: gx · gy · gz · gdata · stages.
        batch: samples of a step.
        every: with every number of ranks that share a sample; else the least with which samples suffice.
    """
    counts = [count for count in divisors(gpus) if count <= model.layers]
    # Mixers take whole samples.
    each = [_shared(model, grids(model, gpus // count), batch, every, not model.mixes) for count in counts]
    gx, gy, gz, gdata = (np.concatenate(several) for several in zip(*(one.axes for one in each), strict=True))
    stages = np.repeat(np.array(counts, np.int64), [len(one) for one in each])
    return Grids(gx, gy, gz, gdata, stages, np.concatenate([one.sequence for one in each]))


def _shared(model: Transformer, at: Grids, batch: int, every: bool, several: bool) -> Grids:
    """Grids by how many ranks of z share a sample: positions are two chunks for each (zigzag), and samples divide among the readers."""
    chosen, shared, left = [], [], np.ones(len(at), bool)
    for count in divisors(int(np.max(at.gz, initial=1))) if several else (1,):
        if count > 1 and model.sequence % (2 * count):
            continue
        fits = left & (at.gz % count == 0) & (batch % np.maximum(at.gz // count * at.gdata, 1) == 0)
        chosen.append(np.flatnonzero(fits))
        shared.append(np.full(int(fits.sum()), count, np.int64))
        left = left if every else left & ~fits
    index, ranks = np.concatenate(chosen), np.concatenate(shared)
    order = np.lexsort((ranks, index))
    return replace(at.take(index[order]), shared=ranks[order])


def bandwidths(machine: Machine, at: Grids, aware: bool = True) -> Bandwidths:
    """Rings' bandwidths: of groups within a node from a table (case 1), of others by equation 5.7 (case 2).

    Args:
        machine: its domains are the nodes.
        at: the grids.
        aware: False for the placement-agnostic model, in which all are the bandwidth between nodes.
    """
    found, inner = [], np.ones(len(at), np.int64)
    for size in at.axes:
        outer = inner * size
        inter = node_bandwidth(machine, outer / np.maximum(inner, machine.domain))
        across = inter / np.minimum(machine.domain, inner)
        if machine.calibration is not None:
            across = np.minimum(across, _within(machine, inner, size))
        found.append(
            np.where(outer <= machine.domain, _within(machine, inner, size), across) if aware else across * 0 + inter
        )
        inner = outer
    return Bandwidths(*found)


def node_bandwidth(machine: Machine, nodes: Number = 2) -> Number:
    """β_inter: bytes a second between two of a group's nodes, over all their interfaces."""
    return machine.slow_bandwidth * machine.interfaces * machine.domain * reached(machine, nodes)[1]


def layer_communication(layer: Linear, samples: Number, at: Grids, beta: Bandwidths, repeats: Repeats) -> Communication:
    """Equations 5.1 to 5.5 of one layer.

    Experts are shared out among data-parallel ranks; an all-to-all over them brings what goes in, and another takes what comes out, in
    forward and backward.

    Args:
        layer: its sizes.
        samples: of a data-parallel group in a step; m, its rows, are each sample's positions.
        at: the grids.
        beta: bytes a second along the axes.
        repeats: how often each runs.
    """
    gx, gy, beta_x, beta_y = (at.gy, at.gx, beta.y, beta.x) if layer.transposed else (at.gx, at.gy, beta.x, beta.y)
    gz, ranks = at.gz, expert_ranks(layer, at)
    gdata = at.gdata // ranks
    weights = 2 * layer.weights / (gx * gy) / ranks
    outputs = 2 * samples * layer.gives * layer.n / (gz * gx)
    inputs = 2 * samples * layer.takes * layer.k / (gz * gy)
    shared = repeats.gradient_bytes * layer.weights / (gx * gy * gz) / ranks
    exchanged = (
        2 * samples * (layer.gives * layer.n if layer.transposed else layer.takes * layer.k) / (at.gx * at.gy * gz)
    )
    exchange = (ranks - 1) / ranks * exchanged / beta.data
    return Communication(
        gather=repeats.gathers * repeats.accumulation * (gz - 1) * weights / gz / beta.z,
        scatter=repeats.accumulation * (gz - 1) / gz * weights / 2 * repeats.scatter_bytes / beta.z,
        forward=repeats.sums * (2 * (gy - 1) / gy * outputs / beta_y + exchange),
        backward=2 * (gx - 1) / gx * inputs / beta_x + exchange,
        data=2 * (gdata - 1) / gdata * shared / beta.data,
    )


def communication(
    machine: Machine, model: Model, at: Grids, batch: int, repeats: Repeats | None = None, aware: bool = True
) -> Communication:
    """Seconds of all collectives of a step.

    Args:
        machine: the networks.
        model: what is trained.
        at: the grids.
        batch: samples of a step, over all GPUs.
        repeats: how often each runs.
        aware: see `bandwidths`.
    """
    beta, samples = bandwidths(machine, at, aware), batch / at.gdata
    parts = [
        layer_communication(layer, samples, at, beta, repeats or Repeats()).times(block.count)
        for block in model.blocks
        for layer in block.linears
    ]
    return reduce(add, parts)


def state_bytes(model: Model, at: Grids, each: float = 16.0) -> Floats:
    """Bytes of weights, gradients and optimizer state of a GPU, which data-parallel ranks repeat, but for experts that they share out.

    Args:
        model: what is trained.
        at: the grids.
        each: bytes a parameter; 16 in mixed precision with Adam.
    """
    shards = at.gx * at.gy * at.gz
    if not isinstance(model, Transformer) or not model.experts:
        return each * model.parameters / shards
    routed = model.expert_parameters / np.gcd(at.gdata, model.experts)
    return each * (model.parameters - model.expert_parameters + routed) / shards


def expert_ranks(layer: Linear, at: Grids) -> npt.NDArray[np.int64]:
    """Data-parallel ranks among which a layer's experts are shared out; 1 without."""
    return np.gcd(at.gdata, layer.copies)


def ranked(at: Grids, seconds: Floats) -> npt.NDArray[np.int64]:
    """The order of grids by time; of equal ones, the one of fewer axes, and of more inner ones, is first."""
    axes = (np.stack(at.axes) > 1).sum(axis=0)
    rounded = np.array([float(f"{value:.9e}") for value in seconds])
    return np.lexsort((-at.gz, -at.gy, -at.gx, axes, rounded))


def model_flops(model: Model, batch: int, recompute: bool = True) -> float:
    """Floating-point operations of a step by Narayanan's formula: 96·B·s·l·h²·(1 + s/6h + V/16lh) with recomputation, 3/4 without.

    The formula is of MLPs four times as wide as the hidden size, and of as many heads of keys and values as of queries. Of U-Nets and other
    transformers, those of their products, two for each multiplication, and twice as many in backward.

    Args:
        model: what is trained.
        batch: samples, B.
        recompute: whether activation checkpointing runs forward again.
    """
    if not isinstance(model, Transformer) or not _narayanans(model):
        products = sum(block.count * block.products for block in model.blocks)
        output = model.sequence * model.vocabulary * model.hidden if isinstance(model, Transformer) else 0
        return batch * ((8 if recompute else 6) * products + 6 * output)
    s, depth, h = model.sequence, model.layers, model.hidden
    layers = 1 + s / (6 * h)
    head = model.vocabulary / (16 * depth * h)
    return 96 * batch * s * depth * h**2 * ((layers if recompute else 0.75 * layers) + head)


def _narayanans(model: Transformer) -> bool:
    """True if a model's layers are those that Narayanan's formula counts."""
    h, other = model.hidden, model.gated or model.experts or model.kinds
    attention = (("qkv", h, 3 * h), ("proj", h, h))
    return not other and model.f == 4 * h == 4 * model.heads * model.q and model.attention_linears == attention


def _within(machine: Machine, inner: npt.NDArray[np.int64], size: npt.NDArray[np.int64]) -> Floats:
    """Measured bandwidths of simultaneous groups of a node, by how many are inside one another and by size, or the network's."""
    table = np.full(len(inner), machine.fast_bandwidth * reached(machine, 1)[0])
    for (before, members), bandwidth in machine.within.items():
        table[(inner == before) & (size == members)] = bandwidth
    return table
