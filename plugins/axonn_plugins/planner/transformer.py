"""One transformer layer by operation, on one GPU: its work and its collectives, for each kind of tensor parallelism (004, Tables I, II, A2).

Rows are positions of a microbatch, all arrays are of candidates. With 1D tensor parallelism over n1, weights and heads are split over n1,
and positions outside of matrix multiplications, too; 2D splits positions over n2 besides; SUMMA splits weights over n1 and n2,
positions over n2 and features over n1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from axonn_plugins.planner import work
from axonn_plugins.planner.collectives import Collective, Kind
from axonn_plugins.planner.model import Transformer
from axonn_plugins.planner.rates import Unit
from axonn_plugins.planner.work import Number, Work

Strategy = Literal["1d", "2d", "summa"]
STRATEGIES: tuple[Strategy, ...] = ("1d", "2d", "summa")
Mode = Literal["calibrated", "roofline", "paper"]
MODES: tuple[Mode, ...] = ("calibrated", "roofline", "paper")


@dataclass(frozen=True)
class Operation:
    """One of a layer's fourteen operations.

    Attributes:
        name: which.
        unit: what computes it.
        work: flop, bytes moved, bytes stored.
        forward: its collectives.
        backward: likewise.
    """

    name: str
    unit: Unit
    work: Work
    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Local:
    """Sizes on one GPU.

    Attributes:
        n1: ranks that split weights and heads.
        n2: ranks that split positions.
        microbatch: samples.
        panels: SUMMA's.
        rows: positions in matrix multiplications.
        own_rows: positions in operations between them.
        norm_width: features of a LayerNorm.
    """

    n1: Number
    n2: Number
    microbatch: Number
    panels: Number
    rows: Number
    own_rows: Number
    norm_width: Number


def local(
    model: Transformer, strategy: Strategy, mode: Mode, n1: Number, n2: Number, microbatch: Number, panels: Number
) -> Local:
    """Sizes on one GPU.

    `mode="paper"` rounds the positions of a sample down, as the published code does, and gives SUMMA's LayerNorms l/n1 features, where
    e/n1 is meant.
    """
    divide: Callable = np.floor_divide if mode == "paper" else np.true_divide
    rows = microbatch * model.sequence / n2
    if strategy == "summa":
        width = divide(model.sequence if mode == "paper" else model.hidden, n1)
        return Local(n1, n2, microbatch, panels, rows, rows, width)
    own_rows = microbatch * divide(divide(model.sequence, n2), n1)
    return Local(n1, n2, microbatch, panels, rows, own_rows, model.hidden * np.ones_like(n1))


def operations(model: Transformer, strategy: Strategy, mode: Mode, size: Local, vector_cost: float) -> list[Operation]:
    """The operations of a layer.

    Args:
        model: sizes of the whole.
        strategy: of tensor parallelism.
        mode: see `local`.
        size: sizes on one GPU.
        vector_cost: the machine's peak of matrix multiplication over that of vector operations.
    """
    product = _summa_product if strategy == "summa" else _product
    e, f, n1 = model.hidden, model.f, size.n1
    width = (
        model.heads + 2 * np.maximum(model.kv, n1)
    ) * model.q  # keys and values are repeated where n1 has more ranks
    elements = size.own_rows * e if strategy != "summa" else size.rows * e / n1
    inner = size.rows * f / n1
    norm = _norm(model, strategy, size)
    return [
        product("fc1", size, e, f, split_output=True),
        Operation("fc1 bias", "vector", work.bias(size.rows, f / n1)),
        Operation("gelu", "vector", work.gelu(inner)),
        Operation("mlp dropout", "vector", work.dropout(inner)),
        product("fc2", size, f, e, split_output=False),
        Operation("fc2 bias", "vector", _output_bias(strategy, size, e, "fc2")),
        Operation("fc2 dropout", "vector", work.dropout(elements)),
        norm,
        product("qkv", size, e, width, split_output=True),
        _attention(model, mode, size, vector_cost),
        product("proj", size, model.heads * model.q, e, split_output=False),
        Operation("proj bias", "vector", _output_bias(strategy, size, e, "proj")),
        Operation("proj dropout", "vector", work.dropout(elements)),
        norm,
    ]


def parameters(model: Transformer, strategy: Strategy, size: Local) -> Number:
    """Parameters of a layer on one GPU: LayerNorms are whole in 1D and 2D, as are the biases that follow a sum over n1."""
    e, f, n1 = model.hidden, model.f, size.n1
    kv = np.maximum(model.kv, n1)
    matrices = (e * model.q * (2 * model.heads + 2 * kv) + 2 * e * f) / n1
    norms = 4 * size.norm_width
    if strategy == "summa":
        return matrices / size.n2 + (f + 2 * e) / n1 + norms
    return matrices + f / n1 + e + (e if strategy == "1d" else e / n1) + norms


def mlp_parameters(model: Transformer, strategy: Strategy, size: Local) -> Number:
    """Of which in the MLP."""
    matrices = 2 * model.hidden * model.f / size.n1
    if strategy == "summa":
        return matrices / size.n2 + (model.f + model.hidden) / size.n1
    return matrices + model.f / size.n1 + model.hidden


def _product(name: str, size: Local, k: Number, n: Number, split_output: bool) -> Operation:
    """A product whose weight n1 splits: along its output, with a sum of gradients over n1, or along its input, with a sum of outputs."""
    if split_output:
        backward = (Collective(Kind.SCATTER, "n1", 2 * size.rows * k),)
        return Operation(name, "tensor", work.matmul(size.rows, k, n / size.n1), (), backward)
    forward = (Collective(Kind.SCATTER, "n1", 2 * size.rows * n),)
    return Operation(name, "tensor", work.matmul(size.rows, k / size.n1, n), forward)


def _summa_product(name: str, size: Local, k: Number, n: Number, split_output: bool) -> Operation:
    """SUMMA: of each panel, activations go over n1 and weights over n2; the second way in backward, gradients are summed so."""
    activations, weights = 2 * size.rows * k / size.panels, 2 * k * n / size.n1 / size.panels
    forward = (Collective(Kind.BROADCAST, "n1", activations), Collective(Kind.BROADCAST, "n2", weights))
    sums = (Collective(Kind.REDUCE, "n1", activations), Collective(Kind.REDUCE, "n2", weights))
    return Operation(name, "tensor", work.summa(size.rows, k, n, size.n1, size.panels), forward, forward + sums)


def _output_bias(strategy: Strategy, size: Local, e: int, name: str) -> Work:
    if strategy == "1d":
        return work.bias(size.rows, e)
    return work.bias(size.own_rows, e) if (strategy, name) == ("2d", "fc2") else work.bias(size.rows, e / size.n1)


def _norm(model: Transformer, strategy: Strategy, size: Local) -> Operation:
    """A LayerNorm and what follows it: the gather of whole rows, or SUMMA's sums of moments and of gradients."""
    done = work.layer_norm(size.own_rows, size.norm_width)
    if strategy != "summa":
        volume = 2 * size.rows * model.hidden
        forward, backward = Collective(Kind.GATHER, "n1", volume), Collective(Kind.SCATTER, "n1", volume)
        return Operation("layer norm", "vector", done, (forward,), (backward,))
    gradients = 2 * (2 * model.hidden / size.n1 + 2 * size.rows)
    return Operation(
        "layer norm",
        "vector",
        done,
        (Collective(Kind.ALL_REDUCE, "n1", 4 * size.rows),),
        (Collective(Kind.ALL_REDUCE, "n1", gradients),),
    )


def _attention(model: Transformer, mode: Mode, size: Local, vector_cost: float) -> Operation:
    """Fused attention; where n2 splits positions, keys and values are gathered, again in backward, and their gradients summed."""
    divide: Callable = np.floor_divide if mode == "paper" else np.true_divide
    heads = size.microbatch * model.heads / size.n1
    kv_heads = size.microbatch * np.maximum(model.kv / size.n1, 1)
    queries = divide(model.sequence, size.n2)
    volume = 4 * kv_heads * model.sequence * model.q
    gather, scatter = Collective(Kind.GATHER, "n2", volume), Collective(Kind.SCATTER, "n2", volume)
    done = work.attention(heads, kv_heads, queries, model.sequence, model.q, vector_cost)
    return Operation("attention", "tensor", done, (gather,), (gather, scatter))
