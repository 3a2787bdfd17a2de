"""Turn a serial model into a parallel one, in place: as placed by a plan, layer by layer.

So that of a model on the meta device no rank holds more than one full layer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.conv import _ConvNd

from axonn_tp.comm.at_times import mark
from axonn_tp.comm.clipping import measure_on_mesh
from axonn_tp.comm.float32_accumulation import accumulate_as
from axonn_tp.comm.overlap import Gathers
from axonn_tp.comm.own_calls import know, take_over
from axonn_tp.comm.replicated import agree_on_bits
from axonn_tp.comm.same_on_replicas import SameOnReplicas
from axonn_tp.comm.same_order import SameOrder
from axonn_tp.comm.unplanned_gradients import sum_unnamed
from axonn_tp.compiled import hooks
from axonn_tp.compiled import layers as compiled
from axonn_tp.compiled.refusals import check_compiled
from axonn_tp.context.huggingface import published_in
from axonn_tp.context.model import share_sequences
from axonn_tp.grid.distribute import agree_on_unread, broadcast, broadcast_buffers, read_rest, without_own
from axonn_tp.grid.leaves import tensors_in
from axonn_tp.grid.mesh import Mesh
from axonn_tp.layers.as_share import take_own
from axonn_tp.layers.batch_norm import synchronise
from axonn_tp.layers.boundary import make_states_whole, whole_states
from axonn_tp.layers.conv import Conv
from axonn_tp.layers.cross_entropy import CrossEntropyLoss
from axonn_tp.layers.eager import compiler_runs, leave_to_eager, tell_uncompiled
from axonn_tp.layers.embedding import Embedding
from axonn_tp.layers.entry import SharedInput
from axonn_tp.layers.exports import refuse_changed
from axonn_tp.layers.group_norm import GroupNorm
from axonn_tp.layers.layer_norm import LayerNorm
from axonn_tp.layers.linear import Linear
from axonn_tp.layers.materialise import Materialiser
from axonn_tp.layers.own_losses import look_at_losses
from axonn_tp.layers.parts import refuse_transforms, refuse_whole_tokens, shared_again, watch_parts
from axonn_tp.layers.rms_norm import RMSNorm
from axonn_tp.layers.shared_uses import SharedUses
from axonn_tp.layers.tuning import TunedMatmul, Tuner
from axonn_tp.layers.tuning_cache import default_cache
from axonn_tp.layers.weight import Split, SplitWeight
from axonn_tp.options import Options
from axonn_tp.plan.counted_attributes import count_locally
from axonn_tp.plan.placement import at_times, place
from axonn_tp.plan.rules import Placement, Plan


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    plan: Plan | Literal["auto"] | None = None,
    options: Options | None = None,
    example_inputs: Any = None,
) -> nn.Module:
    """Turn a serial model into a parallel one, in place; every rank calls it.

    Rank 0's weights are what is split. A model on the meta device is built layer by layer, each module by its own
    `reset_parameters()` in the order of `named_modules`, so the same seed gives the serial model's weights (HF models:
    by their `_init_weights`, see `axonn_tp.layers.materialise`). Of weights that are still in a file
    (`axonn_tp.checkpoint.lazy_tensors`) each rank reads its shards.

    Args:
        model: the serial model; optimizers that already hold its parameters keep holding them.
        mesh: the mesh.
        plan: see `place`; ``"auto"`` finds one and prints it on rank 0 (see `auto_plan`).
        options: layout of activations, overlap, what is kept; see `Options`.
        example_inputs: for the automatic plan, see `auto_plan`.

    Returns:
        `model`.

    Raises:
        ValueError: see `place` and `agree_on_bits`.
    """
    options = options or Options()
    leave_to_eager()
    if plan == "auto":
        # The search builds on this file's plans.
        from axonn_tp.plan.search.auto import auto_plan

        plan, report = auto_plan(model, mesh.grid, example_inputs, options)
        if dist.get_rank() == 0:
            print(report, flush=True)
    elif isinstance(plan, str):
        raise ValueError(f'plan = {plan!r} is not a plan; give what layers become by name pattern, or "auto"')
    gathers = Gathers(mesh, options)
    tuner = Tuner(mesh.device, default_cache(), group=mesh.group("grid")) if options.tune_matmuls else None
    mark(at_times(model, plan))
    placements = {placement.name: placement for placement in place(model, mesh.grid, plan, options)}
    if options.compile:
        check_compiled(model, placements.values(), mesh.grid)
    agree_on_bits(mesh)
    agree_on_unread(model, mesh)
    materialise = Materialiser(model, mesh.device)
    seen: set[int] = set()
    common = without_own(model)
    for name, module in model.named_modules():
        materialise(module)
        if isinstance(module, Split):
            module.remark()
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in seen and not hasattr(parameter, "axonn_layout"):
                seen.add(id(parameter))
                broadcast(parameter, mesh)
        if name in placements:
            _convert(placements[name], mesh, gathers, options)
        read_rest(module, mesh.device)
        if tuner is not None and isinstance(module, Linear):
            module.operation = TunedMatmul(tuner)
        if isinstance(module, nn.TransformerEncoder):
            # Nested tensors are only for the layers' fast path, which is off.
            module.use_nested_tensor = False
    broadcast_buffers(common, mesh)
    synchronise(model, mesh, options.sync_batch_norm)
    _share_inputs(placements)
    sum_unnamed(model, mesh)
    _count_locally(model, placements, options)
    if options.compile:
        _count_forwards(model, gathers)
    else:
        _watch_forward(model, mesh, tuner)
    accumulate_as(model, options)
    measure_on_mesh(model.parameters(), mesh)
    for module in model.modules():
        if isinstance(module, Split):
            know(module.parameters(recurse=False), module.mesh)
    take_over()
    share_sequences(model, mesh, None if options.attention == "auto" else options.attention, options.verify_plan)
    return model


def _count_forwards(model: nn.Module, gathers: Gathers) -> None:
    """As `_watch_forward`, for a compiled model, whose layers gather weights in the graph."""
    known = hasattr(model, "axonn_gathers")
    model.axonn_gathers = gathers  # type: ignore[assignment]
    if not known:
        model.register_forward_pre_hook(hooks.enter, prepend=True)
        model.register_forward_hook(hooks.leave, always_call=True)


_AS_THEY_ARE = SimpleNamespace(
    Linear=Linear, Embedding=Embedding, LayerNorm=LayerNorm, RMSNorm=RMSNorm, CrossEntropyLoss=CrossEntropyLoss
)


class _Forward:
    """The state that a model's hooks share; a copy of the model, or of a part of it, has its own."""

    def __init__(self, mesh: Mesh, tuner: Tuner | None) -> None:
        self.tuner, self.uses, self.same, self.mesh = tuner, SharedUses(mesh), SameOnReplicas(mesh), mesh
        self.order = SameOrder()
        self.running = 0  # forwards, of the model or of its parts, one inside another
        self.calls = 0  # of them, the model's
        self.published = False
        self._layers: dict[Gathers, list[SplitWeight]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        made = memo[id(self)] = _Forward(self.mesh, deepcopy(self.tuner, memo))
        made.published, made.order, made.same = self.published, deepcopy(self.order), deepcopy(self.same)
        return made

    def layers(self, model: nn.Module) -> dict[Gathers, list[SplitWeight]]:
        """The model's layers by who gathers their weights."""
        if self._layers is None:
            self._layers = defaultdict(list)
            for module in model.modules():
                if isinstance(module, SplitWeight):
                    self._layers[module.gathers].append(module)
        return self._layers


def _watch_forward(model: nn.Module, mesh: Mesh, tuner: Tuner | None) -> None:
    """While the model's forward runs, code that reads a split layer's weight finds it whole."""
    before: Any = vars(model).get("axonn_forward")
    forward = _Forward(mesh, tuner)
    forward.published = bool(published_in(model))
    forward.layers(model)  # in `as_serial` layers are of other classes
    model.axonn_forward = forward  # type: ignore[assignment]
    watch_parts(model, forward, before, {id(part) for part in published_in(model)})
    if before is None:
        model.register_forward_pre_hook(_enter_forward, prepend=True, with_kwargs=True)
        model.register_forward_hook(_leave_forward, always_call=True)


def _enter_forward(model: nn.Module, inputs: tuple, keywords: dict[str, Any]) -> Any:
    forward: _Forward = model.axonn_forward  # type: ignore[assignment]
    layers = forward.layers(model)
    forward.running += 1
    forward.calls += 1
    for gathers in layers:  # before what may end the call, which leaves them all the same
        gathers.enter()
    refuse_changed()
    refuse_transforms(layers)
    if layers and compiler_runs():
        tell_uncompiled()
    if forward.tuner is not None and forward.tuner.stepped and not forward.tuner.finished:
        forward.tuner.finish()
    for gathers, held in layers.items():
        # In `as_serial` layers are plain, and gather for themselves.
        if all(isinstance(layer, SplitWeight) for layer in held):
            gathers.begin(held)
    given = inputs, keywords
    if torch.is_grad_enabled():
        if model.training:
            forward.same.begin(given)
        if forward.running == 1 and (model.training or any(tensor.requires_grad for tensor in tensors_in(given))):
            forward.uses.begin(given)
        if model.training and forward.order.looks and forward.uses.looks:
            look_at_losses(model)
    return shared_again(given, forward)


def _leave_forward(model: nn.Module, inputs: tuple, output: object) -> Any:
    forward: _Forward = model.axonn_forward  # type: ignore[assignment]
    if not forward.calls:  # another hook ended the call before it began here
        return None
    forward.calls -= 1
    forward.running -= 1
    for gathers in forward.layers(model):
        gathers.leave()
    if not forward.running:
        forward.uses.end(model, output)
    if model.training:
        forward.order.passed(forward.layers(model))
    make_states_whole(output, forward.mesh)
    return whole_states(output, forward.mesh) if type(output) is tuple and forward.published else None


def _convert(placement: Placement, mesh: Mesh, gathers: Gathers, options: Options) -> None:
    module = placement.module
    kinds: Any = compiled if options.compile else _AS_THEY_ARE
    if isinstance(module, _ConvNd) and placement.split is not None:
        Conv.convert(module, mesh, placement.split, placement.options)
    elif placement.split is not None:
        kinds.Linear.convert(module, mesh, placement.split, placement.options)  # type: ignore[arg-type]
    elif placement.kind == "embedding":
        kinds.Embedding.convert(module, mesh, placement.scatter_tokens, placement.tied)  # type: ignore[arg-type]
    elif placement.kind == "norm":
        norm = kinds.LayerNorm if isinstance(module, nn.LayerNorm) else kinds.RMSNorm
        norm.convert(module, mesh, placement.scatter_tokens)  # type: ignore[arg-type]
    elif placement.kind == "group_norm":
        GroupNorm.convert(module, mesh, placement.inner_axes)  # type: ignore[arg-type]
    else:
        kinds.CrossEntropyLoss.convert(module, mesh, placement.loss_axes, placement.classes)  # type: ignore[arg-type]
    if isinstance(module, SplitWeight):
        module.gathers, module.axonn_name = gathers, placement.name
        gathers.register(module)
    module.register_forward_pre_hook(hooks.keep_slow_path if options.compile else take_own)
    if placement.kind == "norm" and placement.scatter_tokens and mesh.size("x") > 1:
        module.register_forward_pre_hook(refuse_whole_tokens)


def _share_inputs(placements: Mapping[str, Placement]) -> None:
    """Let the layers that read one tensor enter it together."""
    for name, placement in placements.items():
        if placement.readers and placement.readers[0] == name:
            shared = SharedInput(len(placement.readers))
            for reader in placement.readers:
                placements[reader].module.shared = shared  # type: ignore[assignment]


def _count_locally(model: nn.Module, placements: Mapping[str, Placement], options: Options) -> None:
    """Divide what plans name as counts, once where several layers of one module name it."""
    done: set[tuple[str, str]] = set()
    for name, placement in placements.items():
        holder = name.rpartition(".")[0]
        names = [count for count in placement.counts if (holder, count) not in done]
        done.update((holder, count) for count in names)
        module, layer = model.get_submodule(holder), placement.module
        traced = [count for count in names if options.compile and "." not in count]
        if traced:
            hooks.count(module, traced, layer, _shares(layer))
        if names != traced:
            rest = [count for count in names if count not in traced]
            count_locally(module, rest, partial(_shares, layer), getattr(layer, "in_features", 0))


def _shares(layer: nn.Module) -> int:
    """Into how many shares a layer's output is split now; one where it computes as in the serial model (`as_serial`)."""
    return math.prod(layer.mesh.size(axis) for axis in layer.split.split_over) if isinstance(layer, Linear) else 1
