"""The door to Transformer Engine: its product, its 8-bit tensors, its norms, and which recipe is on.

Nothing else here imports it. Its versions 2.2 to 2.20 were read, none was run: that needs a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Engine:
    """The parts of Transformer Engine that our layers call.

    Attributes:
        norms: its LayerNorm and RMSNorm, by name.
        state: tells whether products are in 8 bits, and by which recipe.
    """

    norms: dict[str, type[nn.Module]]
    state: Any
    _gemm: Callable[..., Any]
    _workspace: Callable[[], Tensor] | None
    _quantizer: type
    _types: Any

    def gemm(self, first: Any, second: Any, layout: str, out_dtype: torch.dtype, **others: Any) -> Tensor:
        """Its matrix product, which counts dims from the last: TN is second·firstᵀ, NN second·first, NT secondᵀ·first."""
        if self._workspace is not None:
            others["workspace"] = self._workspace()
        output: Tensor = self._gemm(first, second, layout=layout, out_dtype=out_dtype, **others)[0]
        return output

    def recipe(self) -> Any:
        """The recipe under which a product that is made now is in 8 bits; None where it is not.

        Raises:
            ValueError: it is another than scaling by what a tensor holds.
        """
        if not self.state.is_fp8_enabled():
            return None
        recipe = self.state.get_fp8_recipe()
        if not recipe.float8_current_scaling():
            raise ValueError(
                f"the fp8 recipe {type(recipe).__name__}: axonn3d's layers scale a tensor by what it holds; use Float8CurrentScaling, "
                "--fp8-recipe tensorwise"
            )
        return recipe

    def quantizer(
        self, recipe: Any, backward: bool, choice: Any, device: torch.device, group: dist.ProcessGroup | None
    ) -> Callable[[Tensor], Any]:
        """Casts a matrix to 8 bits, scaled by the largest element on any rank of a group.

        Args:
            recipe: what is on.
            backward: for gradients, of which the hybrid format has other bits.
            choice: the recipe's about tensors of this kind.
            device: of the tensors.
            group: of the ranks that share a tensor; None where one has it whole.
        """
        hybrid = recipe.fp8_format.name == "HYBRID"
        made: Callable[[Tensor], Any] = self._quantizer(
            self._types.kFloat8E5M2 if backward and hybrid else self._types.kFloat8E4M3,
            device=device,
            with_amax_reduction=group is not None,
            amax_reduction_group=group,
            force_pow_2_scales=choice.power_2_scale,
            amax_epsilon=choice.amax_epsilon,
        )
        return made


def load() -> Engine | None:
    """Transformer Engine where it is installed, 2.2 or later; None elsewhere."""
    try:
        import transformer_engine_torch as native
        from transformer_engine import pytorch
        from transformer_engine.pytorch.cpp_extensions import general_gemm
        from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
    except ImportError:
        return None
    try:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager
    except ImportError:
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
    workspace: Callable[[], Tensor] | None = None
    if "workspace" in inspect.signature(general_gemm).parameters:
        from transformer_engine.pytorch.module import base

        workspace = base.get_workspace
    norms = {"LayerNorm": pytorch.LayerNorm, "RMSNorm": pytorch.RMSNorm}
    return Engine(norms, FP8GlobalStateManager, general_gemm, workspace, Float8CurrentScalingQuantizer, native.DType)
