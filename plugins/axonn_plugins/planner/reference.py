"""One candidate in plain numbers, formula by formula as 004 and its published results have them: the slow reference of `step`.

It knows plain models only: f features in the MLP, as many heads of keys as of queries, e/h features a head.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from axonn_plugins.planner.machine import Machine
from axonn_plugins.planner.model import Transformer
from axonn_plugins.planner.search import Plan


@dataclass
class _Layer:
    """Seconds of a layer and microbatch, and what it keeps, as they add up."""

    machine: Machine
    forward: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    backward: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    stored: float = 0.0

    def add(
        self,
        peak: float,
        forward: tuple[float, float],
        backward: tuple[float, float],
        stored: float,
        communicate: tuple[float, float] = (0.0, 0.0),
        panels: int = 0,
    ) -> None:
        """An operation: (flop, bytes) forward and backward, bytes stored, seconds of collectives."""
        self.stored += stored
        for total, (flops, moved), each in zip(
            (self.forward, self.backward), (forward, backward), communicate, strict=True
        ):
            compute = self.machine.flop_latency + flops / (self.machine.flop_efficiency * peak)
            seconds = max(compute, moved / self.machine.memory_bandwidth)
            total[0] += compute
            total[1] += seconds - compute
            total[2] += each + max(panels * each - seconds, 0) if panels else each


def collective(machine: Machine, kind: str, volume: float, n: int, v: int) -> float:
    """Seconds of a collective of n GPUs, v of them in each domain."""
    if n == 1:
        return 0.0
    slow, fast = (rate * machine.bandwidth_efficiency for rate in (machine.slow_bandwidth, machine.fast_bandwidth))
    latency = machine.slow_latency * (n / v - 1) + machine.fast_latency * (n - n / v)
    share = 1.0 if kind == "broadcast" else (n - 1) / n
    if v == 1:
        return latency + share * volume / slow
    if v == n:
        return latency + share * volume / fast
    twice = 2 if kind == "all-reduce" else 1
    return latency + twice * share * volume / min(max(v * machine.interfaces, 1) * slow, fast)


def message(machine: Machine, volume: float, stages: int, v: int, paper: bool) -> float:
    """Mean seconds of a message between stages, v of which share a domain."""
    slow = machine.slow_latency + volume / (machine.slow_bandwidth * machine.bandwidth_efficiency)
    fast = machine.fast_latency + volume / (machine.fast_bandwidth * machine.bandwidth_efficiency)
    if stages == 1:
        return 0.0
    between = 0 if paper and v > 1 else stages // v - 1
    return ((stages - stages // v) * fast + between * slow) / (stages - 1)


def seconds_and_bytes(
    machine: Machine, model: Transformer, plan: Plan, batch: int, paper: bool = False
) -> tuple[float, float]:
    """Time of a step and memory of a GPU.

    Args:
        machine: where it runs.
        model: what is trained.
        plan: its strategy, n1, n2, np, nd, bm, panels and placement.
        batch: samples of a step.
        paper: with the published results' defects.
    """
    strategy, n1, b = plan.strategy, plan.n1, plan.bm
    e, f, length = model.hidden, model.f, model.sequence
    layer = _Layer(machine)
    rows: float = b * length / plan.n2
    if strategy == "summa":
        own, width = rows, (length // n1 if paper else e / n1)
        _summa(layer, model, plan, rows, width)
    else:
        own, width = (b * (length // plan.n2 // n1) if paper else rows / n1), float(e)
        _one_or_two_dims(layer, model, plan, rows, own)
    _attention(layer, model, plan, length // plan.n2 if paper else length / plan.n2)

    matrices = (4 * e * e + 2 * e * f) / n1
    weights = {
        "1d": matrices + f / n1 + 2 * e,
        "2d": matrices + f / n1 + e + e / n1,
        "summa": matrices / plan.n2 + (f + 2 * e) / n1,
    }[strategy] + 4 * width
    layers, microbatches = model.layers // plan.np, batch // plan.nd // b
    forward, backward = sum(layer.forward), sum(layer.backward)
    sent = 2 * microbatches * message(machine, 2 * own * width, plan.np, plan.vp, paper)
    once = microbatches * layers * (forward + backward) + sent
    n, v = (plan.nd * plan.n2, plan.vd * plan.v2) if strategy == "2d" else (plan.nd, plan.vd)
    gather = collective(machine, "all-gather", 2 * weights, n, v)
    data = 2 * gather + (layers - 1) * (max(gather - forward, 0) + max(gather - backward, 0))
    held = layers * (weights * (4 + 12 / n) + layer.stored * min(plan.np, microbatches))
    return once + (plan.np - 1) * once / microbatches + data, held


def _one_or_two_dims(layer: _Layer, model: Transformer, plan: Plan, rows: float, own: float) -> None:
    """Everything but attention in 1D and 2D."""
    machine, e, inner, n1 = layer.machine, model.hidden, model.f / plan.n1, plan.n1
    whole_rows = collective(machine, "all-gather", 2 * rows * e, n1, plan.v1)
    for k, n, communicate in (
        (e, inner, (0.0, whole_rows)),
        (inner, e, (whole_rows, 0.0)),
        (e, 3 * e / n1, (0.0, whole_rows)),
        (e / n1, e, (whole_rows, 0.0)),
    ):
        layer.add(
            machine.tensor,
            (rows * n * (2 * k - 1), 2 * (rows * k + rows * n + k * n)),
            (rows * k * (2 * n - 1) + k * n * (2 * rows - 1), 4 * (k * n + rows * k + rows * n)),
            2 * rows * k,
            communicate,
        )
    biases = {"1d": ((rows, inner), (rows, e), (rows, e)), "2d": ((rows, inner), (own, e), (rows, e / n1))}
    _vector_operations(layer, biases[plan.strategy], rows * inner, own * e)
    for _ in range(2):
        _norm(layer, own, e, (whole_rows, whole_rows))


def _summa(layer: _Layer, model: Transformer, plan: Plan, rows: float, width: float) -> None:
    """Everything but attention with SUMMA."""
    machine, e, f, n1, panels = layer.machine, model.hidden, model.f, plan.n1, plan.panels
    for k, whole in ((e, f), (f, e), (e, 3 * e), (e, e)):
        n = whole / n1
        one = collective(machine, "broadcast", 2 * rows * k / panels, n1, plan.v1)
        one += collective(machine, "broadcast", 2 * k * n / panels, plan.n2, plan.v2)
        layer.add(
            machine.tensor,
            (2 * rows * n * k, 2 * (rows * k + k * n + rows * n * panels)),
            (rows * k * (2 * n - 1) + k * n * (2 * rows - 1), 4 * (k * n + rows * n * panels + rows * k)),
            2 * rows * k / n1,
            (one, 2 * one),
            panels,
        )
    _vector_operations(layer, ((rows, f / n1), (rows, e / n1), (rows, e / n1)), rows * f / n1, rows * e / n1)
    moments = collective(machine, "all-reduce", 4 * rows, n1, plan.v1)
    gradients = collective(machine, "all-reduce", 2 * (2 * e / n1 + 2 * rows), n1, plan.v1)
    for _ in range(2):
        _norm(layer, rows, width, (moments, gradients))


def _vector_operations(layer: _Layer, biases: tuple[tuple[float, float], ...], inner: float, outer: float) -> None:
    """Three biases, GELU, and three dropouts, of which one is of the MLP's inner features."""
    vector = layer.machine.vector
    for r, n in biases:
        layer.add(vector, (r * n, 2 * (r * n + n)), (r * n, 2 * (r * n + n)), 0)
    layer.add(vector, (8 * inner, 4 * inner), (13 * inner, 6 * inner), 2 * inner)
    for x in (inner, outer, outer):
        layer.add(vector, (x, 5 * x), (x, 5 * x), x)


def _norm(layer: _Layer, r: float, w: float, communicate: tuple[float, float]) -> None:
    layer.add(
        layer.machine.vector,
        (9 * r * w, 2 * (2 * r * w + 2 * r + 2 * w)),
        (8 * r * w + 4 * r * (w - 1), 2 * (5 * r * w + 2 * w)),
        2 * r * w,
        communicate,
    )


def _attention(layer: _Layer, model: Transformer, plan: Plan, queries: float) -> None:
    machine, length, q = layer.machine, model.sequence, model.hidden // model.heads
    x, ratio = plan.bm * model.heads / plan.n1, machine.tensor / machine.vector
    logits, product = x * queries * length * (2 * q - 1), x * queries * q * (2 * length - 1)
    transposed = x * length * q * (2 * queries - 1)
    p, sums = x * queries * length, x * queries * (length - 1)
    stored = 4 * x * queries * q + 2 * x * queries
    forward = logits + product + ratio * (2 * p + sums + p)
    backward = product + 2 * transposed + 2 * logits + ratio * (3 * p + sums + p) + ratio * (2 * p + sums + p)
    io = 2 * x * queries * q + 2 * x * length * q
    gather = collective(machine, "all-gather", 4 * x * length * q, plan.n2, plan.v2)
    layer.add(
        machine.tensor,
        (forward, 2 * (io + x * queries)),
        (backward, 2 * (io + stored)),
        2 * stored,
        (gather, 2 * gather),
    )
