"""The parts of a step that 004 leaves out: output layer and loss, the optimizer's step, residual sums; and attention that is not fused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from axonn_plugins.planner import work
from axonn_plugins.planner.machine import Machine
from axonn_plugins.planner.model import Transformer
from axonn_plugins.planner.rates import Unit, spent
from axonn_plugins.planner.transformer import Local, Operation, Strategy
from axonn_plugins.planner.work import Number, Work

_VOCABULARY = 50304
_OPTIMIZER_BYTES = 30
"""A parameter that Adam steps: its gradient read twice, once for the norm, three numbers of 4 bytes read and written, the weight written."""


def residuals(model: Transformer, strategy: Strategy, size: Local) -> list[Operation]:
    """Both sums of a layer with what it was given; backward sums gradients likewise."""
    elements = size.rows * model.hidden / size.n1 if strategy == "summa" else size.own_rows * model.hidden
    return 2 * [Operation("residual", "vector", work.residual(elements))]


def plain_attention(fused: Operation, model: Transformer, size: Local, again: bool) -> list[Operation]:
    """Attention as four kernels, which write scores to memory.

    Args:
        fused: whose collectives and stored bytes they have.
        model: sizes of the whole.
        size: sizes on one GPU.
        again: whether backward computes scores once more (Megatron's selective recomputation).
    """
    heads = size.microbatch * model.heads / size.n1
    kv_heads = size.microbatch * np.maximum(model.kv / size.n1, 1)
    queries, keys, width = model.sequence / size.n2, model.sequence, model.q
    scores, sums = heads * queries * keys, heads * queries * (keys - 1)
    own, shared = heads * queries * width, kv_heads * keys * width
    onto_scores, onto_queries = scores * (2 * width - 1), own * (2 * keys - 1)
    onto_keys = heads * keys * width * (2 * queries - 1)
    once, twice = 2 * (own + shared + scores), 4 * (own + shared + scores)
    logits = Work(onto_scores, once, onto_queries + onto_keys, twice, fused.work.stored)
    softmax = Work(2 * scores + sums, 4 * scores, 3 * scores + sums, 6 * scores, 0.0)
    dropout = replace(work.dropout(scores), stored=0.0)
    if again:
        logits, softmax, dropout = (_again(one) for one in (logits, softmax, dropout))
    product = Work(onto_queries, once, onto_scores + onto_keys, twice, 0.0)
    return [
        Operation("attention", "tensor", logits, fused.forward, fused.backward),
        Operation("softmax", "vector", softmax),
        Operation("attention dropout", "vector", dropout),
        Operation("attention product", "tensor", product),
    ]


def output_seconds(machine: Machine, model: Transformer, size: Local) -> tuple[Number, Number]:
    """Seconds of a microbatch's output layer and loss on the last stage, which every microbatch waits for: compute, waiting for memory.

    Nothing where the vocabulary is unknown; of a calibrated machine, as with GPT-2's.
    """
    vocabulary = model.vocabulary or (_VOCABULARY if machine.calibration else 0)
    if not vocabulary:
        return 0.0, 0.0
    width = vocabulary / size.n1
    logits = size.rows * width
    # Read in 2 bytes, kept in 4, read for the largest and for the sum; backward reads those and writes gradients of 2.
    loss = Work(5 * logits, (2 + 3 * 4) * logits, 2 * logits, (4 + 2) * logits, 0.0)
    compute: Number = 0.0
    waiting: Number = 0.0
    parts: tuple[tuple[Work, Unit], ...] = (
        (work.matmul(size.rows, model.hidden, width), "tensor"),
        (loss, "vector"),
    )
    for done, unit in parts:
        for back, flops, moved in (
            (False, done.flops, done.moved),
            (True, done.backward_flops, done.backward_moved),
        ):
            took = spent(machine, unit, flops, moved, back)
            compute, waiting = compute + took[0], waiting + took[1]
    return compute, waiting


def optimizer_seconds(machine: Machine, parameters: Number) -> Number:
    """Seconds of Adam's step over so many parameters, which waits for memory alone."""
    return _OPTIMIZER_BYTES * parameters / machine.memory_bandwidth


def offload_seconds(machine: Machine, parameters: Number) -> Number:
    """Seconds of so many parameters' states, 12 bytes each, on their way to the GPU and back (000, section 3.3)."""
    return 2 * 12 * parameters / machine.host_bandwidth


def _again(done: Work) -> Work:
    return replace(
        done, backward_flops=done.backward_flops + done.flops, backward_moved=done.backward_moved + done.moved
    )
