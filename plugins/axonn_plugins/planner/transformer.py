"""One transformer layer by operation, on one GPU: its work and its collectives, for each kind of tensor parallelism (004, Tables I, II, A2).

A layer has 004's fourteen operations; of a gated model nine, with neither biases nor dropout.

Rows are positions of a microbatch, all arrays are of candidates. With 1D tensor parallelism over n1, weights and heads are split over n1,
and positions outside of matrix multiplications, too; 2D splits positions over n2 besides; SUMMA splits weights over n1 and n2,
positions over n2 and features over n1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from axonn_plugins.planner import work
from axonn_plugins.planner.collectives import Collective, Kind
from axonn_plugins.planner.layers import remade
from axonn_plugins.planner.model import Transformer
from axonn_plugins.planner.rates import Unit
from axonn_plugins.planner.work import Number, Work

Strategy = Literal["1d", "2d", "summa"]
STRATEGIES: tuple[Strategy, ...] = ("1d", "2d", "summa")
Mode = Literal["calibrated", "roofline", "paper"]
MODES: tuple[Mode, ...] = ("calibrated", "roofline", "paper")


@dataclass(frozen=True)
class Operation:
    """One of a layer's operations.

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


def operations(
    model: Transformer,
    strategy: Strategy,
    mode: Mode,
    size: Local,
    vector_cost: float,
    causal: bool = False,
    routed: Number | None = None,
    kind: str = "",
) -> list[Operation]:
    """The operations of a layer.

    Args:
        model: sizes of the whole.
        strategy: of tensor parallelism.
        mode: see `local`.
        size: sizes on one GPU.
        vector_cost: the machine's peak of matrix multiplication over that of vector operations.
        causal: see `work.attention`.
        routed: of a layer with experts, how many of them this GPU has; None for one without.
        kind: what the layer has, a word of `Transformer.kinds`; by default attention, and an MLP or experts.
    """
    kind = kind or ("*-" if routed is None else "*E")
    elements = size.own_rows * model.hidden if strategy != "summa" else size.rows * model.hidden / size.n1
    found: list[Operation] = []
    if "E" in kind and routed is not None:
        found += _experts(model, strategy, size, elements, routed)
    elif "-" in kind:
        found += _mlp(model, strategy, size, elements)
    if "M" in kind:
        found += [_norm(model, strategy, size, gathers=True), *_mixed(model, strategy, size)]
    if "*" in kind:
        attended = _projected(model, strategy, size)
        attended.insert(-1, _attention(model, mode, size, vector_cost, causal))
        if not (model.gated or model.kinds):
            attended.append(Operation("proj bias", "vector", _output_bias(strategy, size, model.hidden, "proj")))
            attended.append(Operation("proj dropout", "vector", work.dropout(elements)))
        found += [_norm(model, strategy, size, gathers=not model.q_rank), *attended]
    if set(kind) & set("-E"):
        found.append(_norm(model, strategy, size, gathers="E" not in kind or bool(model.shared_feed_forward)))
    return found


def kept(operation: Operation, model: Transformer, mode: Mode, n1: Number) -> Number:
    """Bytes that forward keeps; calibrated, none that are cheap to make again: what is gathered over n1, a gated MLP's product, masks."""
    stored = operation.work.stored
    if mode == "calibrated":
        if remade(operation.name, model.gated):
            return 0.0
        if operation.name.endswith(("fc1", "qkv", "mixer in")):
            return stored / n1
    return stored


def parameters(model: Transformer, strategy: Strategy, size: Local) -> Number:
    """Parameters of a layer without experts on one GPU: LayerNorms are whole in 1D and 2D, as are the biases that follow a sum over n1."""
    e, n1 = model.hidden, size.n1
    whole: Number = 0
    attention = e * (model.heads + np.maximum(model.kv, n1)) * (model.q + model.v)
    if model.attention_gate:
        attention = attention + e * model.heads * model.v
    if model.kv_rank:
        down, *ups = (k * n for _, k, n in model.attention_linears)
        attention, whole = sum(ups), down
    if model.kinds:
        mixer = sum(k * n for _, k, n in model.mixer_linears) + model.mixer_other
        of_layer = {part: model.having(part) / model.layers for part in "*M-E"}
        attention, whole = of_layer["*"] * attention + of_layer["M"] * mixer, of_layer["*"] * whole
        mlps = (of_layer["-"] + of_layer["E"]) * model.matrices * e * model.f
        return (attention + mlps) / n1 + whole + 2 * size.norm_width
    matrices = (attention + model.matrices * e * model.f) / n1
    norms = (2 if model.gated else 4) * size.norm_width
    inner, outer = (0, 0) if model.gated else (model.f, e)
    if strategy == "summa":
        return matrices / size.n2 + whole / (n1 * size.n2) + (inner + 2 * outer) / n1 + norms
    return matrices + whole + inner / n1 + outer + (outer if strategy == "1d" else outer / n1) + norms


def mlp_parameters(model: Transformer, strategy: Strategy, size: Local) -> Number:
    """Parameters that are in the MLP."""
    matrices = model.matrices * model.hidden * model.f / size.n1
    if strategy == "summa":
        matrices = matrices / size.n2
    if model.gated or model.kinds:
        return matrices
    return (
        matrices + (model.f + model.hidden) / size.n1
        if strategy == "summa"
        else matrices + model.f / size.n1 + model.hidden
    )


def expert_parameters(model: Transformer, strategy: Strategy, size: Local) -> tuple[Number, Number]:
    """Parameters of a layer with experts on one GPU: a routed expert's, and the router's and shared experts' together."""
    split = size.n1 * size.n2 if strategy == "summa" else size.n1
    shared = model.matrices * model.hidden * model.shared_feed_forward / split
    return model.expert / split, shared + model.hidden * model.experts


def _mixed(model: Transformer, strategy: Strategy, size: Local) -> list[Operation]:
    """A mixer: its matrices, its gate, and what lies between (`layers.Scan`), whose heads n1 deals out."""
    product, takes = _of(strategy), model.mixer_takes / size.n1
    done = work.scan(size.rows, model.mixer_gives / size.n1, takes, model.mixer_state, model.mixer_chunk)
    within = work.matmul(size.rows, takes, model.mixer_within)
    return [
        product("mixer in", size, model.hidden, model.mixer_gives, split_output=True),
        Operation("scan", "attention", done),
        *([Operation("mixer within", "tensor", within)] if model.mixer_within else []),
        Operation("mixer gate", "vector", work.swiglu(size.rows * takes)),
        product("mixer out", size, model.mixer_takes, model.hidden, split_output=False),
    ]


def _mlp(model: Transformer, strategy: Strategy, size: Local, elements: Number) -> list[Operation]:
    if model.gated or model.kinds:
        return _gated("", model, strategy, size, model.f)
    e, f, n1 = model.hidden, model.f, size.n1
    product, inner = _of(strategy), size.rows * f / n1
    return [
        product("fc1", size, e, f, split_output=True),
        Operation("fc1 bias", "vector", work.bias(size.rows, f / n1)),
        Operation("gelu", "vector", work.gelu(inner)),
        Operation("mlp dropout", "vector", work.dropout(inner)),
        product("fc2", size, f, e, split_output=False),
        Operation("fc2 bias", "vector", _output_bias(strategy, size, e, "fc2")),
        Operation("fc2 dropout", "vector", work.dropout(elements)),
    ]


def _gated(name: str, model: Transformer, strategy: Strategy, size: Local, f: int) -> list[Operation]:
    """Two matrices at once, SiLU of one's output times the other's, and a third; or of a model that is not gated two with GELU between."""
    product, inner = _of(strategy), size.rows * f / size.n1
    return [
        product(f"{name}fc1", size, model.hidden, (model.matrices - 1) * f, split_output=True),
        Operation(f"{name}gate", "vector", work.swiglu(inner) if model.gated else work.gelu(inner)),
        product(f"{name}fc2", size, f, model.hidden, split_output=False),
    ]


def _experts(model: Transformer, strategy: Strategy, size: Local, elements: Number, routed: Number) -> list[Operation]:
    """The router, shared experts, and this GPU's share of the routed ones, to each of which as many positions go.

    What comes for them is gathered over n1, once for each expert that a position goes to. All-to-alls are apart (`experts`).
    """
    ranks = model.experts / routed
    each = replace(size, rows=size.rows * model.experts_per_token * ranks / model.experts)
    first, gate, second = (
        _times(one, routed) for one in _gated("expert ", model, strategy, each, model.expert_feed_forward)
    )
    if strategy != "summa":
        volume = 2 * size.rows * model.experts_per_token * model.hidden
        gather = Collective(Kind.GATHER, "n1", volume)
        first = replace(first, forward=(gather, *first.forward))
        second = replace(second, backward=(gather, *second.backward))
    own_rows = elements / model.hidden
    router = Operation("router", "tensor", work.matmul(own_rows, model.hidden, model.experts))
    shared = _gated("shared ", model, strategy, size, model.shared_feed_forward) if model.shared_feed_forward else []
    return [router, *shared, first, gate, second]


def _projected(model: Transformer, strategy: Strategy, size: Local) -> list[Operation]:
    """Attention's products. Of multi-latent attention, the latent is made on each rank of its own rows, and gathered."""
    e, product = model.hidden, _of(strategy)
    proj = product("proj", size, model.heads * model.v, e, split_output=False)
    if not model.kv_rank:
        # Keys and values are repeated where n1 has more ranks.
        width = (model.heads + np.maximum(model.kv, size.n1)) * model.q + np.maximum(model.kv, size.n1) * model.v
        width = width + (model.heads * model.v if model.attention_gate else 0)
        return [product("qkv", size, e, width, split_output=True), proj]
    _, *ups, _ = model.attention_linears
    down = product("latent", size, e, model.latent, split_output=True)
    if strategy != "summa":
        volume = 2 * size.rows * model.latent
        gather, scatter = Collective(Kind.GATHER, "n1", volume), Collective(Kind.SCATTER, "n1", volume)
        down = Operation("latent", "tensor", work.matmul(size.own_rows, e, model.latent), (gather,), (scatter,))
    return [down, *(product(name, size, k, n, split_output=True) for name, k, n in ups), proj]


def _of(strategy: Strategy) -> Callable[..., Operation]:
    return _summa_product if strategy == "summa" else _product


def _times(operation: Operation, count: Number) -> Operation:
    """So many alike, whose collectives are one."""
    done = operation.work
    several = replace(
        done,
        **{
            name: count * getattr(done, name)
            for name in ("flops", "moved", "backward_flops", "backward_moved", "stored")
        },
    )
    of = lambda group: tuple(replace(one, volume=count * one.volume) for one in group)  # noqa: E731
    return replace(operation, work=several, forward=of(operation.forward), backward=of(operation.backward))


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


def _norm(model: Transformer, strategy: Strategy, size: Local, gathers: bool) -> Operation:
    """A LayerNorm and what follows it: the gather of whole rows where they are needed, or SUMMA's sums of moments and of gradients."""
    done = work.layer_norm(size.own_rows, size.norm_width)
    if strategy != "summa" and not gathers:
        return Operation("layer norm", "vector", done)
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


def _attention(model: Transformer, mode: Mode, size: Local, vector_cost: float, causal: bool) -> Operation:
    """Fused attention; where n2 splits positions, keys and values are gathered, again in backward, and their gradients summed."""
    divide: Callable = np.floor_divide if mode == "paper" else np.true_divide
    heads = size.microbatch * model.heads / size.n1
    kv_heads = heads if model.kv_rank else size.microbatch * np.maximum(model.kv / size.n1, 1)
    queries = divide(model.sequence, size.n2)
    volume = 2 * kv_heads * model.sequence * (model.q + model.v)
    gather, scatter = Collective(Kind.GATHER, "n2", volume), Collective(Kind.SCATTER, "n2", volume)
    done = work.attention(heads, kv_heads, queries, model.sequence, model.q, vector_cost, model.value_width, causal)
    return Operation("attention", "tensor", done, (gather,), (gather, scatter))
