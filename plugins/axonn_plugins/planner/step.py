"""Seconds and bytes of one training step on one GPU, for arrays of candidates: tensor × pipeline × data parallelism (004, section III).

Compute and memory follow the roofline; tensor-parallel collectives are exposed, SUMMA's partly hidden; stages run 1F1B; the optimizer's
state is sharded over data-parallel ranks, whose collectives hide behind the first and last microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from axonn_plugins.planner.collectives import Kind, point_to_point, seconds
from axonn_plugins.planner.experts import Share, exchange_seconds, exchanged_bytes, share
from axonn_plugins.planner.experts import layers as layers_of
from axonn_plugins.planner.machine import Machine
from axonn_plugins.planner.model import Transformer
from axonn_plugins.planner.rates import in_precision, spent, vector_cost
from axonn_plugins.planner.rest import offload_seconds, optimizer_seconds, output_seconds, plain_attention, residuals
from axonn_plugins.planner.schedules import bubble as idle
from axonn_plugins.planner.schedules import in_flight, parts_of
from axonn_plugins.planner.setting import Setting
from axonn_plugins.planner.transformer import Local, Mode, Operation, Strategy, kept, local
from axonn_plugins.planner.work import Number

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Candidates:
    """Configurations, an array each. Letters are the paper's; v is how many of a group's GPUs share a domain.

    Attributes:
        n1: ranks that split weights and heads.
        n2: ranks that split positions; 1 in 1D.
        np: pipeline stages.
        nd: data-parallel ranks.
        bm: samples of a microbatch.
        panels: SUMMA's nb; 1 elsewhere.
        v1: of n1.
        v2: of n2.
        vp: of np.
        vd: of nd.
    """

    n1: Integers
    n2: Integers
    np: Integers
    nd: Integers
    bm: Integers
    panels: Integers
    v1: Integers
    v2: Integers
    vp: Integers
    vd: Integers

    def __len__(self) -> int:
        return len(self.n1)

    def take(self, chosen: npt.NDArray) -> Candidates:
        """Some of them, by index or mask."""
        return Candidates(*(getattr(self, field.name)[chosen] for field in fields(self)))


@dataclass(frozen=True)
class Memory:
    """Bytes of a GPU: 2 + 2 bytes a parameter, 12 that data-parallel ranks share (in float32 4 + 4 and 8), and activations in flight."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats

    @property
    def total(self) -> Floats:
        """Sum of all four."""
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Times:
    """Seconds of a step.

    Attributes:
        compute: at the units' rates.
        memory: what waiting for memory adds.
        tensor: exposed collectives of tensor parallelism.
        data: of data parallelism.
        pipeline: messages between stages.
        bubble: idle at the pipeline's ends.
    """

    compute: Floats
    memory: Floats
    tensor: Floats
    data: Floats
    pipeline: Floats
    bubble: Floats

    @property
    def total(self) -> Floats:
        """Sum of all of them."""
        return self.compute + self.memory + self.tensor + self.pipeline + self.bubble + self.data


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer and microbatch: compute, waiting for memory, exposed collectives; forward, backward, and of it weights' gradients."""

    forward: tuple[Floats, Floats, Floats]
    backward: tuple[Floats, Floats, Floats]
    weights: Floats

    def longer(self, communicate: Number) -> LayerTimes:
        """With so many more seconds of collectives in each direction."""
        forward, backward = self.forward, self.backward
        several = (*forward[:2], forward[2] + communicate), (*backward[:2], backward[2] + communicate)
        return LayerTimes(*several, self.weights)


def memory(
    model: Transformer, strategy: Strategy, mode: Mode, at: Candidates, batch: int, setting: Setting | None = None
) -> Memory:
    """Bytes of a GPU. Placement plays no part.

    Args:
        model: what is trained.
        strategy: of tensor parallelism.
        mode: see `transformer.local`.
        at: the candidates.
        batch: samples of a step.
        setting: how it is trained.
    """
    setting = setting or Setting()
    size = _local(model, strategy, mode, at)
    layers = np.ceil(model.layers / at.np)
    lies = share(model, strategy, size, (at.nd, at.vd), _replicas(strategy, at), setting.experts)
    weights, sharded = _of_fullest(model, strategy, size, at, lies, mode == "calibrated" or setting.whole)
    kinds = layers_of(model, strategy, mode, size, 1.0, at.nd)
    layer = sum(part * kept(operation, model, mode, at.n1) for part, of_layer in kinds for operation in of_layer)
    at_once = in_flight(setting.schedule, setting.interleave, at.np, batch / at.nd / at.bm)
    activations = layer * layers * at_once
    if setting.recompute:
        kept_inputs = _input_bytes(model, strategy, size)
        if setting.stashing:
            kept_inputs = (
                kept_inputs
                + sum(part * _stashed(of_layer, at) for part, of_layer in kinds)
                + exchanged_bytes(model, strategy, size, setting.experts, setting.dropping)
            )
        activations = kept_inputs * layers * at_once + layer
    left, element = setting.kept, setting.element
    index = 2 * left * weights if setting.sparsity else 0 * weights
    states = left * sharded * setting.states
    return Memory(element * weights, element * left * weights, states + index, element / 2 * activations)


def _of_fullest(
    model: Transformer, strategy: Strategy, size: Local, at: Candidates, lies: Share, whole: bool
) -> tuple[Floats, Floats]:
    """Parameters of a GPU of the fullest stage, and of those that it steps; `whole`: with tables of tokens."""
    layers = np.ceil(model.layers / at.np)
    shared, expert = lies.shared * layers, lies.expert * layers
    if whole:
        split = size.n1 * size.n2 if strategy == "summa" else size.n1
        shared = fullest_stage(model, at.np, (lies.shared + lies.expert) * model.layers, split) - expert
    return np.asarray(shared + expert), np.asarray(shared / lies.replicas[0] + expert / lies.expert_replicas[0])


def fullest_stage(model: Transformer, stages: Number, layers: Number, split: Number = 1) -> Number:
    """Parameters of the stage that has most: the table of tokens is in the first, and in the last again or the output layer's own.

    Args:
        model: what is trained.
        stages: of the pipeline, of which the first and last have fewer layers where not all can have as many.
        layers: parameters of all layers, on a GPU without stages.
        split: GPUs among which a table is split.
    """
    each, most = layers / model.layers, np.ceil(model.layers / stages)
    missing = most * stages - model.layers
    first, last = (np.maximum(most - (missing + more) // 2, 1) for more in (1, 0))
    table, beside = model.vocabulary * model.hidden / split, max(model.other, 0) / split
    ends = np.maximum(first * each + table + beside, last * each + table)
    whole = layers + (1 + model.untied) * table + beside
    return np.where(stages == 1, whole, np.maximum(ends, np.where(stages > 2, most * each, 0.0)))


def times(
    machine: Machine,
    model: Transformer,
    strategy: Strategy,
    mode: Mode,
    at: Candidates,
    batch: int,
    setting: Setting | None = None,
) -> Times:
    """Seconds of a step.

    Args:
        machine: where it runs.
        model: what is trained.
        strategy: of tensor parallelism.
        mode: see `transformer.local` and `collectives.point_to_point`.
        at: the candidates.
        batch: samples of a step.
        setting: how it is trained.
    """
    setting = setting or Setting()
    if machine.calibration is not None:
        setting = replace(setting, whole=True)
    machine = in_precision(machine, setting)
    size = _local(model, strategy, mode, at)
    lies = share(model, strategy, size, (at.nd, at.vd), _replicas(strategy, at), setting.experts)
    layer = _distinct_layers(machine, model, strategy, mode, at, setting)
    if lies.mixture:
        layer = layer.longer(exchange_seconds(machine, model, strategy, size, lies, setting.dropping))
    if setting.recompute:
        twice = [first + then for first, then in zip(layer.forward, layer.backward, strict=True)]
        sums = layer.backward[2] if setting.stashing else twice[2]
        layer = LayerTimes(layer.forward, (twice[0], twice[1], sums), layer.weights)
    layers, microbatches = np.ceil(model.layers / at.np), batch / at.nd / at.bm
    forward, backward = sum(layer.forward), sum(layer.backward)

    message = _input_bytes(model, strategy, size)
    hop = point_to_point(machine, message, at.np, at.vp, mode == "paper")
    sent = parts_of(setting.schedule, setting.interleave) * hop
    pipeline = 2 * microbatches * sent
    of_stage = layers * forward + sent, layers * backward + sent, layers * layer.weights
    bubble = np.asarray(idle(setting.schedule, setting.interleave, at.np, *of_stage))

    collective = seconds(machine, Kind.GATHER, 2 * setting.kept * lies.shared, *lies.replicas)
    if lies.mixture:
        collective = collective + seconds(machine, Kind.GATHER, 2 * setting.kept * lies.expert, *lies.expert_replicas)
    hides = 1.0 if machine.calibration is None else machine.calibration.hidden
    hiding = hides * collective
    exposed = 2 * (collective - hiding) + np.maximum(hiding - forward, 0) + np.maximum(hiding - backward, 0)
    data = 2 * collective + (layers - 1) * exposed

    compute, waiting, tensor = (microbatches * layers * (layer.forward[i] + layer.backward[i]) for i in range(3))
    own = _of_fullest(model, strategy, size, at, lies, setting.whole)[1]
    if setting.offload:
        waiting = waiting + offload_seconds(machine, setting.kept * own)
    if setting.whole:
        head = output_seconds(machine, model, size)
        compute = compute + microbatches * head[0]
        waiting = waiting + microbatches * head[1] + optimizer_seconds(machine, setting.kept * own)
    return Times(compute, waiting, tensor, data, pipeline, bubble)


def layer_times(
    machine: Machine, model: Transformer, strategy: Strategy, mode: Mode, at: Candidates, setting: Setting
) -> LayerTimes:
    """Seconds of one layer and microbatch, all candidates one by one."""
    size = _local(model, strategy, mode, at)
    groups = {"n1": (at.n1, at.v1), "n2": (at.n2, at.v2)}
    forward, backward, weights = np.zeros((3, len(at))), np.zeros((3, len(at))), np.zeros(len(at))
    causal = machine.calibration is not None
    for part, of_layer in layers_of(model, strategy, mode, size, vector_cost(machine), at.nd, causal):
        for operation in _trained(of_layer, machine, model, strategy, size, setting):
            forward += part * _direction(machine, operation, groups, False)
            back = part * _direction(machine, operation, groups, True)
            backward += back
            if operation.unit == "tensor" and not operation.name.startswith("attention"):
                weights += (back[0] + back[1]) / 2
    return LayerTimes((forward[0], forward[1], forward[2]), (backward[0], backward[1], backward[2]), weights)


def _direction(
    machine: Machine, operation: Operation, groups: dict[str, tuple[Integers, Integers]], back: bool
) -> Floats:
    done = operation.work
    flops, moved = (done.backward_flops, done.backward_moved) if back else (done.flops, done.moved)
    compute, waiting = spent(machine, operation.unit, flops, moved, back)
    communicate: Number = 0.0
    for collective in operation.backward if back else operation.forward:
        communicate = communicate + seconds(machine, collective.kind, collective.volume, *groups[collective.axis])
    if machine.calibration is not None and operation.name == "attention":
        # Of what goes around a ring, as Megatron's context parallelism does it, compute hides a share (`context`).
        hides = machine.calibration.hidden
        communicate = communicate - np.minimum(hides * communicate, (compute + waiting) * (1 - 1 / groups["n2"][0]))
    if done.panels is not None:
        communicate = communicate + np.maximum(done.panels * communicate - (compute + waiting), 0)
    return np.stack(np.broadcast_arrays(compute, waiting, communicate))


def _trained(
    found: list[Operation], machine: Machine, model: Transformer, strategy: Strategy, size: Local, setting: Setting
) -> list[Operation]:
    """Operations of a layer as it is trained: fused, recomputed or kept."""
    if machine.calibration is not None:
        # One kernel does these along with its neighbour.
        found = [one for one in found if not one.name.endswith(("bias", "dropout"))]
        found = [replace(one, unit="attention") if setting.fused and one.name == "attention" else one for one in found]
    if not setting.fused:
        again = not setting.recompute
        four = [plain_attention(one, model, size, again) if one.name == "attention" else [one] for one in found]
        found = [operation for several in four for operation in several]
    return [*found, *residuals(model, strategy, size)] if setting.whole else found


def _distinct_layers(
    machine: Machine, model: Transformer, strategy: Strategy, mode: Mode, at: Candidates, setting: Setting
) -> LayerTimes:
    """As `layer_times`, each distinct layer once: stages, and data-parallel ranks but for experts, do not change a layer."""
    key = np.zeros(len(at), np.int64)
    shared_out = (at.nd,) if model.experts else ()
    for column in (at.n1, at.n2, at.bm, at.panels, at.v1, at.v2, *shared_out):
        values, index = np.unique(column, return_inverse=True)
        key = key * len(values) + index
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    few = layer_times(machine, model, strategy, mode, at.take(first), setting)
    spread = lambda three: (three[0][inverse], three[1][inverse], three[2][inverse])  # noqa: E731
    return LayerTimes(spread(few.forward), spread(few.backward), few.weights[inverse])


def _input_bytes(model: Transformer, strategy: Strategy, size: Local) -> Number:
    """Bytes of a layer's input, which stages send: that of its first LayerNorm, in the published results as wide as that is taken to be."""
    return 2 * size.own_rows * (size.norm_width if strategy == "summa" else model.hidden)


def _stashed(of_layer: list[Operation], at: Candidates) -> Number:
    """Bytes that the collectives of a layer's forward give a GPU: gathers all of a tensor, reduce-scatters its share."""
    given: Number = 0.0
    for operation in of_layer:
        panels = 1 if operation.work.panels is None else operation.work.panels
        for collective in operation.forward:
            group = getattr(at, collective.axis)
            share = group if collective.kind is Kind.SCATTER else 1
            given = given + np.where(group > 1, panels * collective.volume / share, 0.0)
    return given


def _local(model: Transformer, strategy: Strategy, mode: Mode, at: Candidates) -> Local:
    floats = [column.astype(np.float64) for column in (at.n1, at.n2, at.bm, at.panels)]
    return local(model, strategy, mode, *floats)


def _replicas(strategy: Strategy, at: Candidates) -> tuple[Integers, Integers]:
    """Ranks that hold the same weights, and how many of them share a domain: in 2D also those that split positions."""
    return (at.nd * at.n2, at.vd * at.v2) if strategy == "2d" else (at.nd, at.vd)
