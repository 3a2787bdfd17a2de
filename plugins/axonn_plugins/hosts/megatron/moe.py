"""Megatron's mixtures of experts on a grid, by TED's dispatch (dissertation, chapter 7).

Inside a mixture every rank of x and y has whole tokens, so Megatron's own router decides as it does on one rank: balance losses, capacities and
Sinkhorn's iterations see all tokens of a microbatch. Tokens then go by all-to-alls over the ranks that have other experts, a share from each
tensor rank, whichever of Megatron's dispatchers is named. Experts are Megatron's, one after another, split over the tensor ranks as it
splits them, so that checkpoints are its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import transformer_config
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import experts as megatron_experts
from megatron.core.transformer.moe import moe_layer, shared_experts
from torch import Tensor, nn

from axonn_plugins.hosts.megatron import process_groups
from axonn_plugins.hosts.megatron.originals import Originals
from axonn_plugins.hosts.megatron.parameters import mark, mark_expert
from axonn_plugins.hosts.megatron.sharing import share_of_stream, stream_over, whole_stream
from axonn_tp.comm.collectives import copy_to, reduce_from
from axonn_tp.grid.layout import Layout
from ted_moe.adapters import Choices
from ted_moe.adapters.fused import once
from ted_moe.dropless import through_experts
from ted_moe.gating import Routes, routes_to

_choices = Choices()


def choose(choices: Choices) -> None:
    """Say what of TED is on in mixtures that run from now on."""
    global _choices
    _choices = choices


def install(originals: Originals) -> None:
    """Have mixtures that are made from now on lie on the grid."""
    for name in ("MoEAllGatherTokenDispatcher", "MoEAlltoAllTokenDispatcher"):
        originals.replace(moe_layer, name, _NoDispatcher)
    originals.wrap(moe_layer.MoELayer, "__init__", _with_groups)
    originals.replace(moe_layer.MoELayer, "forward", _mixed)
    originals.wrap(megatron_experts.SequentialMLP, "__init__", _with_own_experts)
    originals.wrap(shared_experts.SharedExpertMLP, "forward", _gated)
    originals.wrap(transformer_config.TransformerConfig, "__post_init__", _with_biases)


class _NoDispatcher:
    """In the place of Megatron's dispatchers."""

    def __init__(self, *args: Any, **named: Any) -> None:
        pass


def _with_biases(original: Callable[..., None]) -> Callable[..., None]:
    """Megatron would add an expert's bias once for each rank that splits it, and so refuses biases there; ours is added once."""

    @wraps(original)
    def check(self: Any) -> None:
        given = self.expert_tensor_parallel_size
        biased = self.num_moe_experts is not None and self.add_bias_linear
        self.expert_tensor_parallel_size = 1 if biased else given
        original(self)
        if biased:
            self.expert_tensor_parallel_size = given or self.tensor_model_parallel_size

    return check


def _with_groups(original: Callable[..., None]) -> Callable[..., None]:
    """The router is told that a microbatch's tokens are all here, the experts where they are."""

    @wraps(original)
    def init(self: Any, *args: Any, pg_collection: Any = None, **named: Any) -> None:
        mesh = process_groups.mesh()
        alone = mesh.group("alone")
        groups = ProcessGroupCollection()
        groups.tp = groups.cp = groups.tp_cp = alone
        # Ranks that share sequences have all tokens of these each.
        groups.tp_dp_cp = mesh.group("readers")
        groups.tp_ep = groups.ep = _group("expert")
        groups.expt_tp = _group("tensor") if mesh.experts.topology.expert_tensor > 1 else alone
        groups.expt_dp = _group("expert_data")
        original(self, *args, pg_collection=groups, **named)
        self.axonn_number = mesh.experts.enrol(f"of layer {self.layer_number}")
        # What is saved of them is counted by tensor rank.
        self.tp_group = self.router.tp_group = mesh.group("model")
        for parameter in self.router.parameters():
            mark(parameter, Layout(tuple(parameter.shape)), mesh)
        if self.shared_experts is not None:
            self.shared_experts.tp_group = mesh.group("model")
            _share_gate(self.shared_experts)

    return init


def _group(axis: str) -> dist.ProcessGroup:
    return process_groups.mesh().experts.group(axis)


def _share_gate(module: Any) -> None:
    """The weight of a shared expert's gate is whole on every rank, which uses its own features and tokens of it."""
    mesh = process_groups.mesh()
    if module.gate_weight is not None:
        mark(module.gate_weight, Layout(tuple(module.gate_weight.shape)), mesh)
        scattered = "x" in stream_over(process_groups.settings(), mesh)
        module.gate_weight.axonn_sum_over = "model" if scattered else "y"


def _gated(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if not self.use_shared_expert_gate:
            return original(self, hidden_states)
        mesh = process_groups.mesh()
        weight = self.gate_weight.chunk(mesh.size("y"), -1)[mesh.rank("y")]
        score = torch.sigmoid(reduce_from(F.linear(hidden_states, weight), mesh, "y"))
        return MLP.forward(self, hidden_states)[0] * copy_to(score, mesh, "y")

    return forward


class _ExpertColumn(layers.ColumnParallelLinear):
    """An expert's first layer."""

    @property
    def bias_here(self) -> Tensor | None:
        """The bias that this rank adds to its share of the output."""
        return self.bias


class _ExpertRow(layers.RowParallelLinear):
    """An expert's last layer: its bias is added by one of the ranks whose shares are summed, which the dispatch does."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.explicit_expert_comm = True

    @property
    def bias_here(self) -> Tensor | None:
        """The bias that this rank adds to its part of the sum."""
        return None if self.bias is None else once(self.bias, self.tp_group.rank() == 0)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, _ = super().forward(input_)
        return output, self.bias_here


def _with_own_experts(original: Callable[..., None]) -> Callable[..., None]:
    """With initial values of one rank, where these are drawn on the CPU; elsewhere those of the first rank with the same experts."""

    @wraps(original)
    def init(self: Any, num_local_experts: int, config: Any, submodules: Any, *args: Any, **named: Any) -> None:
        mesh, everywhere = process_groups.mesh(), config.use_cpu_initialization and config.perform_initialization
        submodules = replace(submodules, linear_fc1=_ExpertColumn, linear_fc2=_ExpertRow)
        made = config.num_moe_experts if everywhere else num_local_experts
        original(self, made, config, submodules, *args, **named)
        if made > num_local_experts:
            first = mesh.experts.rank("expert") * num_local_experts
            self.local_experts = nn.ModuleList(list(self.local_experts)[first : first + num_local_experts])
            self.num_local_experts = num_local_experts
        for parameter in self.local_experts.parameters():
            mark_expert(parameter)
            if not everywhere:
                dist.broadcast(parameter.data, mesh.experts.ranks("expert_data")[0], _group("expert_data"))

    return init


def _mixed(
    self: Any, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None, **named: Any
) -> tuple[Tensor, None]:
    """`MoELayer.forward` on shares of the stream."""
    mask = None if padding_mask is None else padding_mask.transpose(0, 1).bool()
    run = partial(_mix, self)
    if self.moe_layer_recompute:
        return tensor_parallel.checkpoint(run, False, hidden_states, mask), None
    return run(hidden_states, mask), None


def _mix(layer: Any, share: Tensor, mask: Tensor | None) -> Tensor:
    settings, mesh = process_groups.settings(), process_groups.mesh()
    shared = layer.shared_experts_compute(share)
    whole = whole_stream(share, settings, mesh)
    weights, chosen = layer.router(whole, mask)
    tokens, routes = whole.reshape(-1, whole.shape[-1]), _routes(layer.config, weights, chosen)
    if layer.config.moe_apply_probs_on_input:
        tokens = (tokens * weights.sum(-1, keepdim=True)).to(tokens.dtype)
        routes = replace(routes, weights=torch.ones_like(routes.weights))
    mixture = share_of_stream(_through(layer, tokens, routes).view_as(whole), settings, mesh)
    return mixture if shared is None else mixture + shared


def _routes(config: Any, weights: Tensor, chosen: Tensor) -> Routes:
    """The router's choices, by token.

    Args:
        config: Megatron's.
        weights: S × E.
        chosen: S × E, no more than `moe_router_topk` of each row, or, where experts are padded to their capacity, such with a weight of 0.
    """
    experts = weights.shape[1]
    if config.moe_pad_expert_input_to_capacity:
        chosen = chosen & (weights != 0)
    numbers = torch.arange(experts, device=weights.device)
    indices = torch.where(chosen, numbers, experts).sort(1).values[:, : config.moe_router_topk]
    given = weights.gather(1, indices.clamp(max=experts - 1))
    return routes_to(indices, given * (indices < experts), experts)


def _through(layer: Any, tokens: Tensor, routes: Routes) -> Tensor:
    """Send tokens to their experts and back."""
    groups = process_groups.mesh().experts
    split, several = groups.topology.expert_tensor > 1, groups.size("tensor") > 1
    drop = several and (_choices.duplicate_token_dropping or not split)
    fused = drop and split and _choices.fused

    def run(rows: Tensor, counts: list[int]) -> Tensor:
        rows = copy_to(rows, groups, "tensor") if split and not fused else rows
        output, _ = layer.experts(rows, torch.tensor(counts), rows.new_ones(len(rows)))
        return reduce_from(output, groups, "tensor") if split and not fused else output

    trained = any(parameter.requires_grad for parameter in layer.experts.parameters())
    number, degree = layer.axonn_number, _choices.overlap_degree
    return through_experts(tokens, routes, run, groups, drop, drop and split, fused, number, trained, degree)
