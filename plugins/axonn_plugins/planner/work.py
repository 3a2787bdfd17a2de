"""Operations of a transformer: FLOPs, bytes moved and bytes kept, as pure functions of local sizes (004, section III and appendix).

Sizes are numbers or numpy arrays of candidates, which broadcast. Elements take 2 bytes, those of a dropout mask 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

Number = float | npt.NDArray[Any]
"""One number, or one for each candidate."""

_ELEMENT, _MASK = 2, 1


@dataclass(frozen=True)
class Work:
    """Work of one operation on one GPU.

    Attributes:
        flops: of forward.
        moved: bytes between the GPU and its memory in forward.
        backward_flops: of backward.
        backward_moved: bytes in backward.
        stored: bytes that forward keeps for backward.
        panels: SUMMA's steps, into which the operation's collectives are cut; None where they are not.
    """

    flops: Number
    moved: Number
    backward_flops: Number
    backward_moved: Number
    stored: Number
    panels: Number | None = None


def matmul(rows: Number, k: Number, n: Number) -> Work:
    """(rows × k) times (k × n), and both products of its backward."""
    return Work(
        rows * n * (2 * k - 1),
        _ELEMENT * (rows * k + rows * n + k * n),
        rows * k * (2 * n - 1) + k * n * (2 * rows - 1),
        _ELEMENT * 2 * (k * n + rows * k + rows * n),
        _ELEMENT * rows * k,
    )


def summa(rows: Number, k: Number, n: Number, n1: Number, panels: Number) -> Work:
    """SUMMA's (rows × k) times (k × n), the output's columns over `n1`; each panel adds to the output, which is moved each time."""
    local = n / n1
    return Work(
        2 * rows * local * k,
        _ELEMENT * (rows * k + k * local + rows * local * panels),
        rows * k * (2 * local - 1) + k * local * (2 * rows - 1),
        _ELEMENT * 2 * (local * k + rows * local * panels + rows * k),
        _ELEMENT * rows * k / n1,
        panels,
    )


def bias(rows: Number, n: Number) -> Work:
    """A bias added to rows × n."""
    flops, moved = rows * n, _ELEMENT * (rows * n + n)
    return Work(flops, moved, flops, moved, 0.0)


def gelu(x: Number) -> Work:
    """GELU of x elements."""
    return Work(8 * x, _ELEMENT * 2 * x, 13 * x, _ELEMENT * 3 * x, _ELEMENT * x)


def swiglu(x: Number) -> Work:
    """SiLU of x elements times as many others; it keeps both."""
    return Work(9 * x, _ELEMENT * 3 * x, 16 * x, _ELEMENT * 5 * x, _ELEMENT * 2 * x)


def dropout(x: Number) -> Work:
    """Dropout of x elements; it keeps its mask."""
    moved = _ELEMENT * 2 * x + _MASK * x
    return Work(x, moved, x, moved, _MASK * x)


def residual(x: Number) -> Work:
    """A sum of x elements with what a layer was given; backward sums gradients likewise."""
    moved = _ELEMENT * 3 * x
    return Work(x, moved, x, moved, 0.0)


def layer_norm(rows: Number, width: Number) -> Work:
    """LayerNorm of rows × width."""
    elements = rows * width
    return Work(
        9 * elements,
        _ELEMENT * (2 * elements + 2 * rows + 2 * width),
        8 * elements + 4 * rows * (width - 1),
        _ELEMENT * (5 * elements + 2 * width),
        _ELEMENT * elements,
    )


def attention(
    heads: Number,
    kv_heads: Number,
    queries: Number,
    keys: Number,
    width: Number,
    vector_cost: float,
    value_width: Number = 0,
    causal: bool = False,
) -> Work:
    """Fused attention (FlashAttention): logits, softmax, dropout, product; backward computes the first three again.

    Args:
        heads: of all sequences of the microbatch, on this GPU.
        kv_heads: of keys and values, likewise; as many as `heads`, unless queries share them.
        queries: positions on this GPU.
        keys: positions of the sequence.
        width: features of a head's queries and keys.
        vector_cost: flop of the tensor unit that take as long as one of the vector unit.
        value_width: features of a head's values; 0 for as many.
        causal: positions attend to those before them alone, and the rest is not computed: half of everything but what is moved.
    """
    values = value_width or width
    seen = 0.5 if causal else 1
    logits = heads * queries * keys * (2 * width - 1)
    product = heads * queries * values * (2 * keys - 1)
    onto_keys = heads * keys * width * (2 * queries - 1)
    onto_values = heads * keys * values * (2 * queries - 1)
    onto_weights, onto_queries = heads * queries * keys * (2 * values - 1), heads * queries * width * (2 * keys - 1)
    weights = heads * queries * keys
    row_sums = heads * queries * (keys - 1)
    softmax, backward_softmax = 2 * weights + row_sums, 3 * weights + row_sums
    own, shared, statistics = heads * queries * (width + values), kv_heads * (width + values), heads * queries
    stored = _ELEMENT * (own + shared * queries + 2 * statistics)
    forward = logits + product + vector_cost * (softmax + weights)
    onto_both, again = onto_keys + onto_values, logits + onto_weights
    backward = onto_queries + onto_both + again + vector_cost * (backward_softmax + weights + softmax + weights)
    return Work(
        seen * forward,
        _ELEMENT * (own + shared * keys + statistics),
        seen * backward,
        _ELEMENT * (shared * keys + own) + stored,
        stored,
    )


def scan(rows: Number, gives: Number, takes: Number, state: int, chunk: int) -> Work:
    """A mixer between its matrices (`layers.Scan`): a short convolution, then a scan in chunks, whose states are kept; backward makes the rest again.

    Args:
        rows: positions of all samples of the microbatch.
        gives: features of a position that come, on this GPU.
        takes: features that leave.
        state: numbers of state for each of these.
        chunk: positions of a chunk; 0 for one after another.
    """
    flops = rows * takes * (4 * state + chunk)
    moved = _ELEMENT * rows * (3 * gives + takes)
    return Work(flops, moved, 3 * flops, 2 * moved, _ELEMENT * rows * (gives + takes * state / (chunk or rows)))
