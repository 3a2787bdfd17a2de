"""Local products of our layers by kernels of others: Transformer Engine's, also in 8 bits, and apex's, which add to ``main_grad``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from axonn_plugins.hosts.megatron import process_groups
from axonn_plugins.hosts.megatron.engine import Engine
from axonn_tp.layers.product import Matmul, Operation

Kernel = Callable[[Tensor, Tensor, Tensor], Any]
"""Adds gradᵀ·input to the last of (input, grad, sum)."""


def apex_kernel() -> Kernel | None:
    """Apex's kernel where it was built."""
    try:
        import fused_weight_gradient_mlp_cuda as kernels
    except ImportError:
        return None

    def add(input: Tensor, grad: Tensor, total: Tensor) -> None:
        wide = total.dtype == torch.float32
        (kernels.wgrad_gemm_accum_fp32 if wide else kernels.wgrad_gemm_accum_fp16)(input, grad, total)

    return add


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


class Accumulated(Matmul):
    """A product whose weight gradient is added to Megatron's buffer where no sum over z comes between.

    Args:
        layer: whose.
        kernel: adds; None where nothing is to be added.
    """

    def __init__(self, layer: Any, kernel: Kernel | None) -> None:
        self._layer, self._kernel = layer, kernel if layer.mesh.size("z") == 1 else None

    def grad_weight(self, grad: Tensor, input: Tensor, shape: torch.Size) -> Tensor:  # noqa: D102
        shard = self._layer._shard()
        main = getattr(shard, "main_grad", None)
        if self._kernel is None or main is None:
            return self._multiplied(_rows(grad), _rows(input))
        self._kernel(_rows(input), _rows(grad), main.view(shape))
        # Megatron's hook adds nothing then, but for a weight that another layer shares, of which autograd sums both gradients.
        shard.grad_added_to_main_grad = True
        return grad.new_zeros(()).expand(shape)

    def _multiplied(self, grad: Tensor, input: Tensor) -> Tensor:
        return grad.t().mm(input)


class EngineMatmul(Accumulated):
    """Transformer Engine's product, in the type of the activations, or in 8 bits where that is on as a forward begins.

    Args:
        layer: whose.
        engine: Transformer Engine.
        adds: weight gradients are added to Megatron's buffer.
    """

    def __init__(self, layer: Any, engine: Engine, adds: bool) -> None:
        super().__init__(layer, self._add if adds else None)
        self._engine, self._quantizers = engine, dict[Any, Callable[[Tensor], Any]]()

    def once(self) -> Operation:  # noqa: D102
        recipe = self._engine.recipe()
        return self if recipe is None else _EightBits(self, recipe)

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: D102
        made = self._engine.gemm(weight.contiguous(), _rows(input), "TN", input.dtype, bias=bias)
        return made.view(*input.shape[:-1], -1)

    def grad_input(self, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:  # noqa: D102
        return self._engine.gemm(weight.contiguous(), _rows(grad), "NN", grad.dtype, grad=True).view(shape)

    def _multiplied(self, grad: Tensor, input: Tensor) -> Tensor:
        return self._engine.gemm(input, grad, "NT", grad.dtype, grad=True)

    def _add(self, input: Tensor, grad: Tensor, total: Tensor) -> None:
        self._engine.gemm(input, grad, "NT", total.dtype, grad=True, out=total, accumulate=True)


class _EightBits(EngineMatmul):
    """The products of one forward and its backward in 8 bits: the weight is cast once, unless it is gathered again.

    Ranks of x, y and z share every tensor, or hold the same, so that a scale is the same on all of them, as on one rank.
    """

    def __init__(self, plain: EngineMatmul, recipe: Any) -> None:
        super().__init__(plain._layer, plain._engine, plain._kernel is not None)
        self._quantizers, self._recipe, self.tokens = plain._quantizers, recipe, plain.tokens
        self._weight: Any = None
        self._grad: tuple[Tensor, Any] | None = None

    def once(self) -> Operation:  # noqa: D102
        return self

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: D102
        cast = self._cast("fwd_weight", weight.contiguous())
        if not self._layer.reshard_after_forward or self._layer.mesh.size("z") == 1:
            self._weight = cast
        split = self._recipe.fp8_gemm_fprop.use_split_accumulator
        rows = self._cast("fwd_inp", _rows(input))
        made = self._engine.gemm(cast, rows, "TN", input.dtype, bias=bias, use_split_accumulator=split)
        return made.view(*input.shape[:-1], -1)

    def grad_input(self, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:  # noqa: D102
        cast = self._cast("fwd_weight", weight.contiguous()) if self._weight is None else self._weight
        rows = self._cast("bwd_grad", _rows(grad))
        self._grad = grad, rows
        split = self._recipe.fp8_gemm_dgrad.use_split_accumulator
        made = self._engine.gemm(cast, rows, "NN", grad.dtype, grad=True, use_split_accumulator=split)
        return made.view(shape)

    def grad_weight(self, grad: Tensor, input: Tensor, shape: torch.Size) -> Tensor:  # noqa: D102
        try:
            return super().grad_weight(grad, input, shape)
        finally:
            self._grad = None

    def _multiplied(self, grad: Tensor, input: Tensor) -> Tensor:
        return self._weight_gradient(grad, input, out_dtype=grad.dtype)

    def _add(self, input: Tensor, grad: Tensor, total: Tensor) -> None:
        self._weight_gradient(grad, input, out_dtype=total.dtype, out=total, accumulate=True)

    def _weight_gradient(self, grad: Tensor, input: Tensor, out_dtype: torch.dtype, **others: Any) -> Tensor:
        rows = self._cast("bwd_grad", grad) if self._grad is None else self._grad[1]
        split = self._recipe.fp8_gemm_wgrad.use_split_accumulator
        cast = self._cast("fwd_inp", input)
        return self._engine.gemm(cast, rows, "NT", out_dtype, grad=True, use_split_accumulator=split, **others)

    def _cast(self, kind: str, rows: Tensor) -> Any:
        recipe = self._recipe
        key = kind, recipe.fp8_format, rows.device
        if key not in self._quantizers:
            choice = getattr(recipe, f"fp8_quant_{kind}")
            group = process_groups.sharers()
            backward = kind == "bwd_grad"
            self._quantizers[key] = self._engine.quantizer(recipe, backward, choice, rows.device, group)
        return self._quantizers[key](rows)
