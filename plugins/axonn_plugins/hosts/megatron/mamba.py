"""Mamba and hybrid models on a grid: mixers are computed whole on every rank of x and y, all else is split as in a GPT model.

A mixer's scan needs a sequence from its beginning, so that every rank of x and y gathers the residual stream before it and takes its share
after it; ranks that share sequences each scan whole ones and keep their own tokens. Weights of mixers are whole on every rank, z included, and
their gradients are summed over z and data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.extensions import transformer_engine as te
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import transformer_layer
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor

from axonn_plugins.hosts.megatron import context, process_groups
from axonn_plugins.hosts.megatron.checkpoint import by_layout
from axonn_plugins.hosts.megatron.engine_layers import (
    EngineColumnParallelLinear,
    EngineRowParallelLinear,
    LayerNormColumnParallelLinear,
)
from axonn_plugins.hosts.megatron.features import MODELS
from axonn_plugins.hosts.megatron.layers import ColumnParallelLinear, RowParallelLinear
from axonn_plugins.hosts.megatron.norms import split_norms
from axonn_plugins.hosts.megatron.originals import Originals
from axonn_plugins.hosts.megatron.parameters import mark
from axonn_plugins.hosts.megatron.randomness import bias_dropout_add_in_stream
from axonn_plugins.hosts.megatron.sharing import share_of_stream, whole_stream
from axonn_plugins.hosts.megatron.whole_layers import WholeLayerNormLinear, WholeLinear
from axonn_tp.grid.layout import Layout


def install(originals: Originals) -> list[tuple[type, type]]:
    """Have mixers that are made from now on lie on the grid.

    Returns:
        The model and the stack of its layers; nothing where Megatron has them not, or as a `HybridModel`, which is refused when it is made.
    """
    try:
        from megatron.core.models.mamba.mamba_model import MambaModel
        from megatron.core.ssm import mamba_block, mamba_layer, mamba_mixer
    except ImportError:
        return []
    if any(base.__name__ in MODELS for base in MambaModel.__mro__):
        return []
    originals.wrap(mamba_block.MambaStack, "__init__", _with_layers)
    if not _has_engine():
        originals.replace(mamba_block, "TENorm", WrappedTorchNorm)
    originals.wrap(mamba_layer.MambaLayer, "__init__", _in_stream)
    originals.wrap(mamba_mixer, "make_sharded_tensors_for_checkpoint", by_layout)
    originals.wrap(mamba_mixer.MambaMixer, "__init__", _whole)
    originals.wrap(mamba_mixer.MambaMixer, "forward", _of_whole_sequences)
    return [(MambaModel, mamba_block.MambaStack)]


def _has_engine() -> bool:
    return isinstance(te.TELinear, type)


def _with_layers(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def init(self: Any, config: Any, submodules: Any, *args: Any, **named: Any) -> None:
        original(self, config, on_grid(submodules, config), *args, **named)
        split_norms(self, ("final_norm",))

    return init


def _in_stream(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def init(self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        bias_dropout_add_in_stream(self)
        split_norms(self, ("norm",))

    return init


def _whole(original: Callable[..., None]) -> Callable[..., None]:
    """A mixer counts its heads by the groups of the collection that it is given: those of one rank."""

    @wraps(original)
    def init(self: Any, *args: Any, pg_collection: Any = None, **named: Any) -> None:
        mesh = process_groups.mesh()
        groups = copy.copy(pg_collection)
        groups.tp = groups.cp = mesh.group("alone")
        original(self, *args, pg_collection=groups, **named)
        # What is saved of it is counted by tensor rank.
        self.tp_group = mesh.group("model")
        parameters = list(self.parameters())
        for parameter in parameters:
            mark(parameter, Layout(tuple(parameter.shape)), mesh)
        if mesh.size("model") > 1:
            # Tensor ranks have drawn other values on their devices, and the same on CPUs beside these.
            send_first([one.data for one in parameters if one.device.type == mesh.device.type], self.tp_group)

    return init


def send_first(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Give tensors the first rank's values, by one call for all types."""
    # The widest first, so that each begins at a multiple of its width.
    tensors = sorted(tensors, key=lambda one: one.itemsize, reverse=True)
    if not tensors:
        return
    flat = torch.cat([one.reshape(-1).view(torch.uint8) for one in tensors])
    dist.broadcast(flat, group=group, group_src=0)
    for one, sent in zip(tensors, flat.split([one.nbytes for one in tensors]), strict=True):
        one.copy_(sent.view(one.dtype).view_as(one))


def _of_whole_sequences(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **named: Any) -> tuple[Tensor, None]:
        settings, mesh = process_groups.settings(), process_groups.mesh()
        here = whole_stream(hidden_states, settings, mesh)
        if context.ranks() == 1:
            output, bias = original(self, here, *args, **named)
        else:
            output, bias = original(self, context.of_all(here), *args, **named)
            output = output.index_select(0, context.shared(len(here)).places(output.device))
        return share_of_stream(output, settings, mesh), bias

    return forward


def on_grid(part: Any, config: Any) -> Any:
    """A copy of a spec, or of a part of one, with layers of ours in the place of those that a grid splits.

    Args:
        part: a `ModuleSpec`, the submodules of one, or a layer.
        config: Megatron's.

    Raises:
        ValueError: a layer that axonn3d does not know.
    """
    if isinstance(part, ModuleSpec):
        if part.module is MoELayer:
            experts = config.num_moe_experts
            return part if experts is None else get_moe_module_spec(_has_engine(), experts)
        if hasattr(part.submodules, "in_proj"):
            normed = part.submodules.in_proj is te.TELayerNormColumnParallelLinear
            first = WholeLayerNormLinear if normed else WholeLinear
            return replace(part, submodules=replace(part.submodules, in_proj=first, out_proj=WholeLinear))
        return replace(part, module=_layer(part.module), submodules=on_grid(part.submodules, config))
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{one.name: on_grid(getattr(part, one.name), config) for one in fields(part)})
    return part if part is None or isinstance(part, dict) else _layer(part)


def _layer(kind: Any) -> Any:
    for known, ours in _layers():
        if kind is known:
            return ours
    name = getattr(kind, "__name__", kind)
    raise ValueError(
        f"{name} is no layer of which axonn3d knows how it lies on a grid; use a --spec of Megatron's own layers, such as "
        "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
    )


def _layers() -> Iterator[tuple[Any, Any]]:
    """Megatron's layers of such models, and what is put in their place."""
    from megatron.core.ssm.mamba_layer import MambaLayer
    from megatron.core.ssm.mlp_layer import MLPLayer

    local = LocalSpecProvider().core_attention()
    yield from (
        (te.TELayerNormColumnParallelLinear, LayerNormColumnParallelLinear),
        (te.TEColumnParallelLinear, EngineColumnParallelLinear),
        (te.TERowParallelLinear, EngineRowParallelLinear),
        (te.TEDotProductAttention, TESpecProvider().core_attention() if _has_engine() else local),
        (te.TENorm, te.TENorm if _has_engine() else WrappedTorchNorm),
        (layers.ColumnParallelLinear, ColumnParallelLinear),
        (layers.RowParallelLinear, RowParallelLinear),
        (DotProductAttention, local),
    )
    kept = [SelfAttention, MLP, transformer_layer.TransformerLayer, MLPLayer, MambaLayer, WrappedTorchNorm]
    kept.append(getattr(transformer_layer, "MoETransformerLayer", MoELayer))
    yield from ((one, one) for one in (*kept, IdentityOp, IdentityFuncOp, get_bias_dropout_add))
