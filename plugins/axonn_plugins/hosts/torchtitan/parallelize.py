"""The function that torchtitan calls in the place of a model's own `parallelize_fn`: the model on the grid, initialised as in one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.embedding import Embedding
from torchtitan.protocols.module import Module

import axonn_tp
from axonn_plugins.config import ConfigError, TensorParallel
from axonn_plugins.hosts.common import tensor_parallel
from axonn_plugins.hosts.torchtitan.refusals import check
from axonn_tp import Grid, Mesh, auto_plan, clip_grad_norm_, layout_of, sync_gradients
from axonn_tp.layers.weight import Split

_TOKENS = 10
"""Tokens of the pass by which the automatic plan is found."""
_meshes: WeakKeyDictionary[nn.Module, Mesh] = WeakKeyDictionary()


def parallelize(
    block: TensorParallel,
    model: Any,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> nn.Module:
    """Split a model on the meta device; every rank calls it.

    Args:
        block: how.
        model: torchtitan's serial model.
        parallel_dims: its meshes, from which the sizes of ours follow; from here on it asks for plain tensors.
        training: its section of the configuration.
        parallelism: its section; the same.
        compile_config: its section.
        ac_config: activation checkpointing, None for none.
        dump_folder: of the run.

    Returns:
        The model. Its parameters have memory; `init_weights` gives them the serial model's values.

    Raises:
        ConfigError: what cannot be split, or not so.
    """
    check(model, parallel_dims, training, compile_config)
    grid = _grid(block, parallel_dims)
    mesh = Mesh(grid, parallel_dims.world_mesh.device_type)
    _split(model, mesh, block, _options(block, training, parallelism))
    for module in model.modules():
        if isinstance(module, Split):
            module._init_self_parameters = partial(_initialise, module, mesh)  # type: ignore[assignment]
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if training.mixed_precision_param != training.dtype:
        # The head is called by itself where the loss goes through the tokens in chunks.
        for module in (model, model.lm_head):
            _compute_in(module, mesh.device.type, TORCH_DTYPE_MAP[training.mixed_precision_param])
    # What a model of ours takes and gives is whole on every rank of x and y, so that losses need to know of no axis.
    parallelism.spmd_backend = parallel_dims.spmd_backend = "partial_dtensor"
    dist_utils.set_spmd_backend(parallelism.spmd_backend)
    _meshes[model] = mesh
    if not hasattr(dist_utils.clip_grad_norm_, "axonn"):
        dist_utils.clip_grad_norm_ = _summing(dist_utils.clip_grad_norm_)
    return model


def mesh_of(model: nn.Module) -> Mesh | None:
    """The mesh of a model that was split here."""
    return _meshes.get(model)


def _grid(block: TensorParallel, dims: Any) -> Grid:
    gy = block.given["gy"]
    if dims.tp % gy:
        raise ConfigError(
            f"axonn: gy = {gy} does not divide parallelism.tensor_parallel_degree = {dims.tp}, which is gx*gy; change one of them"
        )
    return Grid(dims.tp // gy, gy, dims.dp_shard, dims.dp_replicate)


def _options(block: TensorParallel, training: Any, parallelism: Any) -> axonn_tp.Options:
    options = tensor_parallel.options(block)
    if "reshard_after_forward" not in block.model_fields_set:
        options = replace(options, reshard_after_forward=parallelism.fsdp_reshard_after_forward != "never")
    mixed = training.mixed_precision_param != training.dtype
    return replace(options, gradient_dtype=training.mixed_precision_reduce if mixed else None)


def _split(model: Any, mesh: Mesh, block: TensorParallel, options: axonn_tp.Options) -> None:
    plan: Any = tensor_parallel.layer_plans(block)
    for module in model.modules():
        if type(module) is Embedding:
            module.__class__ = _Embedding
    # The memory is filled later, in torchtitan's order, by random numbers of which none may be drawn here.
    with torch.random.fork_rng(devices=[mesh.device] if mesh.device.type == "cuda" else []):
        try:
            if block.plan == "auto":
                with _plain_attention(model):
                    plan, report = auto_plan(model, mesh.grid, _example(model), options)
                # A loss in chunks takes all tokens and their labels.
                plan = {name: replace(layer, whole_tokens=layer.kind == "embedding") for name, layer in plan.items()}
                if dist.get_rank() == 0:
                    print(report, file=sys.stderr, flush=True)
            with _placeholders(model, mesh.device):
                axonn_tp.parallelize(model, mesh, plan, options)
        except ValueError as error:
            raise ConfigError(f"axonn: {error}") from None


def _example(model: Any) -> dict[str, Tensor]:
    return {"tokens": torch.arange(_TOKENS) % model.config.vocab_size, "positions": torch.arange(_TOKENS)}


class _Embedding(nn.Embedding, Module):
    """torchtitan's looks words up in its own tensor-parallel group, which is not used here; this one leaves that to be split."""


class _Plain(nn.Module):
    """Attention as kernels for GPUs compute it, head by head, on any device."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: Any, scale: float | None, enable_gqa: bool
    ) -> Tensor:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        return found.transpose(0, 1)


@contextmanager
def _plain_attention(model: nn.Module) -> Iterator[None]:
    """Inside, what the model asks kernels for runs where there are none."""
    kernels = [
        (module._modules, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, (FlexAttention, VarlenAttention))
    ]
    for table, name, _ in kernels:
        table[name] = _Plain()
    try:
        yield
    finally:
        for table, name, child in kernels:
            table[name] = child


@contextmanager
def _placeholders(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, modules are initialised by nothing but their buffers: `init_weights` comes later."""

    def reset(module: Module) -> None:
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.zero_()
        module._init_self_buffers(buffer_device=device)

    modules = [module for module in model.modules() if isinstance(module, Module)]
    for module in modules:
        module.reset_parameters = partial(reset, module)
    try:
        yield
    finally:
        for module in modules:
            del module.reset_parameters


def _initialise(module: Any, mesh: Mesh) -> None:
    """Initialise a split module as its `_init_self_parameters` does, on whole tensors, of which this rank keeps its part."""
    held = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    for name, parameter in held.items():
        whole = parameter.new_empty(layout_of(parameter).serial_shape)
        module._parameters[name] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    type(module)._init_self_parameters(module)
    for name, parameter in held.items():
        whole = module._parameters[name].detach()
        parameter.detach().copy_(layout_of(parameter).shard(whole, mesh.grid, mesh.coordinates))
        module._parameters[name] = parameter


def _compute_in(module: nn.Module, device: str, dtype: torch.dtype) -> None:
    """Parameters keep their type, and what is computed has another."""
    forward = module.forward

    @wraps(forward)
    def mixed(*args: Any, **keywords: Any) -> Any:
        with torch.autocast(device, dtype):
            return forward(*args, **keywords)

    module.forward = mixed


def _summing(original: Any) -> Any:
    @wraps(original)
    def clip(parameters: Any, max_norm: float, *rest: Any, **keywords: Any) -> Tensor:
        """Clip as torchtitan does; for a split model the sums over ranks come first, once for all micro-batches of a step."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        found = [mesh for model, mesh in _meshes.items() if parameters and next(model.parameters()) is parameters[0]]
        if not found:
            return original(parameters, max_norm, *rest, **keywords)
        sync_gradients(parameters, found[0], average=False)
        return clip_grad_norm_(parameters, found[0], max_norm)

    clip.axonn = True  # type: ignore[attr-defined]
    return clip
