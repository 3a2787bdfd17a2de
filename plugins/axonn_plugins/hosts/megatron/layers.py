"""Megatron's column- and row-parallel linear layers as 3D parallel matrix multiplication (dissertation §5.1.1).

A column-parallel layer is a normal one, contracting over y, its output split over x; a row-parallel one is transposed.
They take the arguments and give the results of `megatron.core.tensor_parallel.layers`, with shapes
(sequence, micro-batch, features), where features, and in the scattered layout the sequence, are this rank's share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from axonn_plugins.hosts.megatron import process_groups
from axonn_plugins.hosts.megatron.gathers import OwnShards
from axonn_plugins.hosts.megatron.parameters import new_bias, new_weight
from axonn_plugins.hosts.megatron.products import Accumulated, apex_kernel
from axonn_plugins.hosts.megatron.sharing import column_split, row_split, share_of_stream
from axonn_tp.comm.collectives import gather_from
from axonn_tp.layers.linear import Linear
from axonn_tp.layers.linear_split import LinearSplit
from axonn_tp.layers.product import Matmul


class Parallel(OwnShards, Linear):  # type: ignore[misc]
    """The common part of both layers: a linear of `axonn_tp` that is made from Megatron's arguments."""

    sequence_parallel = False

    def _build(
        self, input_size: int, output_size: int, split: LinearSplit, name: str, config: Any, skip_bias_add: bool
    ) -> None:
        nn.Module.__init__(self)
        mesh = process_groups.mesh()
        split.check(output_size, input_size, mesh.grid, name)
        self.in_features, self.out_features, self.split, self.shared = input_size, output_size, split, None
        self.input_size, self.output_size = input_size, output_size
        self.config, self.skip_bias_add = config, skip_bias_add
        self._prepare(
            mesh, {"weight": split.weight_layout(output_size, input_size), "bias": split.bias_layout(output_size)}
        )
        self.operation = self._new_operation(name)
        # Megatron's activations are (sequence, batch, features); what we scatter is the sequence.
        self.operation.tokens = 0
        # As Megatron's: checkpoints of Transformer Engine's layers have this key.
        self._register_load_state_dict_pre_hook(_without_extra_state)

    def _new_operation(self, name: str) -> Matmul:
        kernel = apex_kernel() if self.config.gradient_accumulation_fusion else None
        return Matmul() if kernel is None else Accumulated(self, kernel)

    def _allocate(self, weight: bool, bias: bool, init_method: Callable[[Tensor], Any], dim: int) -> None:
        layouts, mesh, config = self.layouts, self.mesh, self.config
        drawn = new_weight(layouts["weight"], mesh, config, init_method, dim) if weight else None
        self._parameters["weight"] = drawn
        self._parameters["bias"] = new_bias(layouts["bias"], mesh, config) if bias else None

    def _product(self, input: Tensor) -> tuple[Tensor, Tensor | None]:
        """The product with its bias, or without it and the bias by itself."""
        if self.skip_bias_add:
            bias = self.bias
            # A view, since Megatron's recomputation of an MLP would make what it returns, the parameter, a result of its own.
            return self.multiply(input, None), bias if bias is None else bias.view_as(bias)
        return self.multiply(input, self.bias), None

    def compute_dtype(self, shard: Tensor) -> torch.dtype:
        """The weight's type also where the stream has another, as with ``fp32_residual_connection``."""
        return super().compute_dtype(self._shard())

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As Megatron's layers have; the arguments are those of `checkpoint.sharded_module`."""
        from axonn_plugins.hosts.megatron.checkpoint import sharded_module

        return sharded_module(self, *args, **kwargs)

    def backward_dw(self) -> None:
        """Weight gradients are not delayed."""

    def get_extra_state(self) -> None:
        """None, as Megatron's own layers."""

    def set_extra_state(self, state: Any) -> None:
        """Ignored, as by Megatron's own layers."""


def _without_extra_state(state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    state_dict.setdefault(f"{prefix}_extra_state")


_HEADS = {"qkv": "num_query_groups", **dict.fromkeys(("q_proj", "q_up_proj", "kv_up_proj"), "num_attention_heads")}
_TO_LATENT, _FROM_LATENT = ("q_down_proj", "kv_down_proj"), ("q_up_proj", "kv_up_proj")


HEADS: WeakSet[ColumnParallelLinear] = WeakSet()
"""Layers that give logits of a share of all words."""


class ColumnParallelLinear(Parallel):
    """Y = X·Wᵀ + b with W split over x along its output and over y along its input features, and over z.

    Args:
        input_size: features of X.
        output_size: features of Y.
        config: Megatron's.
        init_method: fills a weight in place.
        bias: whether there is one.
        gather_output: give every rank all of Y's features.
        stride: Y is that many matrices side by side, as gate and up of a gated linear unit are.
        skip_bias_add: return the bias instead of adding it.
        skip_weight_param_allocation: the weight is another layer's, given to `forward`.
        is_expert: must be false.
        tp_comm_buffer_name: tells what the layer is for: whether its output consists of heads (`_HEADS`), and whether it makes a latent
            (`_TO_LATENT`), which every rank gets whole, or reads one.
        others: Megatron's further arguments; see `_NOT_READ`.

    Raises:
        ValueError: sizes do not divide by the axes that split them, the layer is an expert's, or another argument asks for something.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        **others: Any,
    ) -> None:
        refuse_experts(is_expert)
        refuse_others(others)
        settings, mesh = process_groups.settings(), process_groups.mesh()
        role = tp_comm_buffer_name
        heads = getattr(config, _HEADS[role]) if role in _HEADS else None
        split = column_split(settings, mesh, output_size, stride, heads)
        name = f"ColumnParallelLinear {tp_comm_buffer_name or 'output'}"
        self._build(input_size, output_size, split, name, config, skip_bias_add)
        self.gather_output, self.takes_whole = gather_output or role in _TO_LATENT, role in _FROM_LATENT
        self.output_size_per_partition = output_size // _ranks(self)
        if role is None and not gather_output:
            HEADS.add(self)
        self._allocate(not skip_weight_param_allocation, bias, init_method, 0)

    def forward(  # type: ignore[override]
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Share of X → share of Y, and the bias' share where it is not added."""
        if weight is not None:
            self.lend(weight)
        if self.takes_whole:
            input_ = share_of_stream(input_, process_groups.settings(), self.mesh)
        output, bias = self._product(input_)
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gather:
            for axis in reversed(self.split.split_over):
                output = gather_from(output, self.mesh, axis)
        return output, bias


class RowParallelLinear(Parallel):
    """Y = X·Wᵀ + b with W split over y along its output and over x along its input features, and over z.

    Args:
        input_size: features of X.
        output_size: features of Y.
        config: Megatron's.
        init_method: fills a weight in place.
        bias: whether there is one.
        input_is_parallel: must be true: X is split over x.
        skip_bias_add: return the bias instead of adding it.
        stride: see `ColumnParallelLinear`; of no effect.
        is_expert: must be false.
        tp_comm_buffer_name: the layer's name in messages.
        others: Megatron's further arguments; see `_NOT_READ`.

    Raises:
        ValueError: sizes do not divide by the axes that split them, the input is whole, the layer is an expert's, or another argument
            asks for something.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        stride: int = 1,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        **others: Any,
    ) -> None:
        refuse_experts(is_expert)
        refuse_others(others)
        if not input_is_parallel:
            raise ValueError(
                "input_is_parallel = False: axonn3d's row-parallel layer follows a column-parallel one, whose output is split; "
                "set it to True"
            )
        name = f"RowParallelLinear {tp_comm_buffer_name or ''}".rstrip()
        self._build(input_size, output_size, row_split(process_groups.settings()), name, config, skip_bias_add)
        self.input_is_parallel = True
        self.input_size_per_partition = input_size // self.mesh.size("x")
        self._allocate(True, bias, init_method, 1)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """Share of X → share of Y, and the bias' share where it is not added."""
        return self._product(input_)


def _ranks(layer: ColumnParallelLinear) -> int:
    ranks = 1
    for axis in layer.split.split_over:
        ranks *= layer.mesh.size(axis)
    return ranks


def refuse_experts(is_expert: bool) -> None:
    """Refuse to be an expert's layer."""
    if is_expert:
        raise ValueError(
            "is_expert = True: experts of axonn3d are Megatron's own layers, made by its SequentialMLP; use that"
        )


_NOT_READ = ("tp_group", "pg_collection", "name", "embedding_activation_buffer", "grad_output_buffer")
"""Arguments of which nothing is taken: groups are the mesh's, the buffers are for a feature that is refused, names are for messages."""


def refuse_others(others: Mapping[str, Any]) -> None:
    """Refuse arguments that change what a layer computes, in this version of Megatron or a later one.

    Args:
        others: those that a layer does not read.

    Raises:
        ValueError: names the first that is neither none nor false, but for those of `_NOT_READ`.
    """
    for name, value in others.items():
        if name not in _NOT_READ and value not in (None, False):
            raise ValueError(f"{name} = {value}: axonn3d's layers have nothing of the kind; leave it out")
