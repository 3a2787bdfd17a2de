"""``--moe-grouped-gemm`` on a grid: products of a rank's experts as one, by torch's grouped product.

Parameters stay those of Megatron's listed experts, so that checkpoints, gradients and shares are as without the flag; their matrices are laid
side by side for each pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from axonn_plugins.hosts.megatron.originals import Originals

_ALIGNED = 16
"""Bytes of which rows of matrices must be a multiple for the kernel."""
_FROM = (9, 0)
"""The compute capability that has it."""


def install(originals: Originals, providers: list[type]) -> None:
    """Have mixtures that are made from now on listed experts, whose products are grouped where they are asked for."""
    for provider in providers:
        originals.wrap(provider, "grouped_mlp_modules", _listed)
    originals.wrap(SequentialMLP, "forward", _grouped)


def _listed(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def grouped_mlp_modules(self: Any, *given: bool, **named: bool) -> Any:
        return original(self, *(False for _ in given), **dict.fromkeys(named, False))

    return grouped_mlp_modules


def has_kernel(rows: Tensor, *matrices: Tensor) -> bool:
    """True if torch multiplies rows by these matrices, each its own group of them, at once."""
    if not hasattr(F, "grouped_mm"):
        return False
    if any(matrix.shape[-1] * matrix.element_size() % _ALIGNED for matrix in matrices):
        return False
    if rows.device.type != "cuda":
        return rows.device.type == "cpu" and rows.dtype != torch.float64
    return rows.dtype == torch.bfloat16 and torch.cuda.get_device_capability(rows.device) >= _FROM


def _grouped(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def forward(self: Any, rows: Tensor, counts: Tensor, scales: Tensor) -> Any:
        first = self.local_experts[0]
        several = self.config.moe_grouped_gemm and self.num_local_experts > 1 and len(rows)
        if not several or not has_kernel(rows, first.linear_fc1.weight, first.linear_fc2.weight):
            return original(self, rows, counts, scales)
        # Scales are those of `moe`, ones: rows are weighed once they are back.
        return MLP.forward(_Together(self, counts.to(rows.device)), rows)

    return forward


class _Together:
    """An MLP that is all experts of a rank: what `MLP.forward` reads of one."""

    def __init__(self, experts: Any, counts: Tensor) -> None:
        first = experts.local_experts[0]
        self.config, self.activation_func = first.config, first.activation_func
        self.linear_fc1 = _Products([expert.linear_fc1 for expert in experts.local_experts], counts)
        self.linear_fc2 = _Products([expert.linear_fc2 for expert in experts.local_experts], counts)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"Megatron's MLP asks for {name} of experts whose products are grouped, which they have not; leave --moe-grouped-gemm out"
        )


class _Products:
    """The same layer of all experts: rows in the order of the experts, so many of each → their products, biases added."""

    def __init__(self, layers: list[Any], counts: Tensor) -> None:
        self._layers, self._counts = layers, counts

    def __call__(self, rows: Tensor) -> tuple[Tensor, None]:
        for layer in self._layers:
            # With --overlap-param-gather they wait for the weights, or begin to gather them.
            for hook in list(layer._forward_pre_hooks.values()):
                hook(layer, (rows,))
        matrices = torch.stack([layer.weight for layer in self._layers])
        ends = self._counts.cumsum(0).to(torch.int32)
        output = F.grouped_mm(rows, matrices.mT, offs=ends)
        if self._layers[0].bias is not None:
            biases = torch.stack([layer.bias_here for layer in self._layers])
            output = output + biases.repeat_interleave(self._counts, 0)
        return output, None
