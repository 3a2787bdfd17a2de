"""A double of Transformer Engine on CPUs: the interface that its pages and our door agree on, checked strictly, numbers visibly in 8 bits.

What it was not told of is an error: unknown arguments, layouts, types and shapes that the kernels refuse.
"""

from __future__ import annotations

import enum
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

CALLS: Counter[str] = Counter()
"""The number of calls, by kind."""


class DType(enum.Enum):
    """Of the native library."""

    kFloat8E4M3 = torch.float8_e4m3fn
    kFloat8E5M2 = torch.float8_e5m2


class Format(enum.Enum):
    """Of a recipe: in HYBRID gradients have the wider range."""

    E4M3 = "e4m3"
    HYBRID = "hybrid"


@dataclass
class Float8CurrentScaling:
    """The recipe of --fp8-recipe tensorwise."""

    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp: Any = field(default_factory=lambda: SimpleNamespace(power_2_scale=False, amax_epsilon=0.0))
    fp8_quant_fwd_weight: Any = field(default_factory=lambda: SimpleNamespace(power_2_scale=True, amax_epsilon=0.0))
    fp8_quant_bwd_grad: Any = field(default_factory=lambda: SimpleNamespace(power_2_scale=False, amax_epsilon=0.0))
    fp8_gemm_fprop: Any = field(default_factory=lambda: SimpleNamespace(use_split_accumulator=False))
    fp8_gemm_dgrad: Any = field(default_factory=lambda: SimpleNamespace(use_split_accumulator=True))
    fp8_gemm_wgrad: Any = field(default_factory=lambda: SimpleNamespace(use_split_accumulator=True))

    def float8_current_scaling(self) -> bool:
        return True


class DelayedScaling:
    """Another recipe."""

    fp8_format = Format.HYBRID

    def float8_current_scaling(self) -> bool:
        return False


class FP8GlobalStateManager:
    """Which recipe is on."""

    recipe: Any = None

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.recipe is not None

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        return cls.recipe


@contextmanager
def fp8_autocast(enabled: bool = True, fp8_recipe: Any = None, fp8_group: Any = None) -> Iterator[None]:
    before, FP8GlobalStateManager.recipe = FP8GlobalStateManager.recipe, fp8_recipe if enabled else None
    try:
        yield
    finally:
        FP8GlobalStateManager.recipe = before


@dataclass
class Float8Tensor:
    """The result of a quantizer: no torch tensor, so that nothing else can read it."""

    data: Tensor
    scale_inv: Tensor


class Float8CurrentScalingQuantizer:
    def __init__(
        self,
        fp8_dtype: DType,
        device: torch.device,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: dist.ProcessGroup | None = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
    ) -> None:
        assert isinstance(fp8_dtype, DType) and isinstance(device, torch.device) and rowwise and columnwise
        assert with_amax_reduction == (amax_reduction_group is not None)
        self.type, self.group = fp8_dtype.value, amax_reduction_group
        self.powers, self.epsilon = force_pow_2_scales, amax_epsilon

    def __call__(self, tensor: Tensor) -> Float8Tensor:
        assert type(tensor) in (Tensor, nn.Parameter) and tensor.dim() == 2 and tensor.is_contiguous()
        assert not torch.is_grad_enabled(), "autograd would record a cast"
        assert tensor.shape[0] % 16 == 0 and tensor.shape[1] % 16 == 0, tuple(tensor.shape)
        CALLS[f"cast to {self.type}"] += 1
        largest = tensor.abs().max().float()
        if self.group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        scale = torch.finfo(self.type).max / largest.clamp(min=max(self.epsilon, 1e-30))
        if self.powers:
            scale = torch.exp2(torch.floor(torch.log2(scale)))
        return Float8Tensor((tensor.float() * scale).to(self.type), 1 / scale)


_LAYOUTS = {
    "TN": lambda first, second: second @ first.t(),
    "NN": lambda first, second: second @ first,
    "NT": lambda first, second: second.t() @ first,
}


def general_gemm(
    A: Any,
    B: Any,
    out_dtype: torch.dtype | None = None,
    quantization_params: None = None,
    gelu: bool = False,
    gelu_in: None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: None = None,
    ub_type: None = None,
    extra_output: None = None,
    bulk_overlap: bool = False,
) -> tuple[Tensor, None, None, None]:
    """As of 2.12; what we do not use may not be given."""
    plain = (quantization_params, gelu, gelu_in, alpha, beta, ub, ub_type, extra_output, bulk_overlap)
    assert plain == (None, False, None, 1.0, None, None, None, None, False)
    assert grad == (layout != "TN") and (bias is None or layout == "TN")
    eight = isinstance(A, Float8Tensor)
    assert eight == isinstance(B, Float8Tensor), "one operand is in 8 bits alone"
    assert use_split_accumulator == (eight and grad)
    CALLS[f"{layout} in 8 bits" if eight else layout] += 1
    both = [one.data.float() * one.scale_inv if eight else one for one in (A, B)]
    assert all(one.dim() == 2 and one.is_contiguous() for one in both) and both[0].dtype == both[1].dtype
    assert out_dtype in (torch.float32, torch.bfloat16, torch.float16)
    made = _LAYOUTS[layout](*both)
    made = made if bias is None else made + bias
    if out is None:
        assert not accumulate
        return made.to(out_dtype), None, None, None
    assert accumulate and out.is_contiguous() and out.dtype == out_dtype and out.shape == made.shape
    CALLS["added"] += 1
    return out.add_(made), None, None, None


def _with_workspace(*arguments: Any, workspace: Tensor, **others: Any) -> Any:
    assert workspace is _WORKSPACE
    return general_gemm(*arguments, **others)


_WORKSPACE = torch.empty(1, dtype=torch.uint8)


class LayerNorm(nn.LayerNorm):
    def __init__(self, normalized_shape: int, eps: float = 1e-5, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__(normalized_shape, eps, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        CALLS["norm"] += 1
        return super().forward(input)


class RMSNorm(nn.RMSNorm):
    def __init__(self, normalized_shape: int, eps: float = 1e-5, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__(normalized_shape, eps, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        CALLS["norm"] += 1
        return super().forward(input)


def _kernel(types: tuple[torch.dtype, ...]) -> Any:
    def add(input: Tensor, grad: Tensor, total: Tensor) -> None:
        assert total.dtype in types and total.is_contiguous() and input.dtype == grad.dtype
        assert input.dim() == grad.dim() == 2 and input.is_contiguous() and grad.is_contiguous()
        CALLS["added by apex"] += 1
        total.add_((grad.float().t() @ input.float()).to(total.dtype))

    return add


def _module(name: str, **attributes: Any) -> dict[str, ModuleType]:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(attributes)
    return {name: made}


def _modules(engine: bool, apex: bool, old: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if apex:
        wide, narrow = _kernel((torch.float32,)), _kernel((torch.float16, torch.bfloat16))
        found |= _module("fused_weight_gradient_mlp_cuda", wgrad_gemm_accum_fp32=wide, wgrad_gemm_accum_fp16=narrow)
    if engine:
        top = "transformer_engine.pytorch"
        gemm = _with_workspace if old else general_gemm
        found |= _module("transformer_engine_torch", DType=DType)
        found |= _module("transformer_engine") | _module(top, LayerNorm=LayerNorm, RMSNorm=RMSNorm)
        found["transformer_engine"].pytorch = found[top]  # type: ignore[attr-defined]
        found |= (
            _module(f"{top}.cpp_extensions", general_gemm=gemm) | _module(f"{top}.tensor") | _module(f"{top}.module")
        )
        found |= _module(f"{top}.tensor.float8_tensor", Float8CurrentScalingQuantizer=Float8CurrentScalingQuantizer)
        state = f"{top}.fp8" if old else f"{top}.quantization"
        found |= _module(state, FP8GlobalStateManager=FP8GlobalStateManager)
        if old:
            found |= _module(f"{top}.module.base", get_workspace=lambda: _WORKSPACE)
            found[f"{top}.module"].base = found[f"{top}.module.base"]
    return found


@contextmanager
def installed(engine: bool = False, apex: bool = False, old: bool = False) -> Iterator[None]:
    """Inside, our layers find the doubles; Megatron, imported before, does not.

    Args:
        engine: Transformer Engine's.
        apex: of apex's kernel.
        old: as of 2.2, whose product is given its workspace.
    """
    modules = _modules(engine, apex, old)
    sys.modules.update(modules)
    CALLS.clear()
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
