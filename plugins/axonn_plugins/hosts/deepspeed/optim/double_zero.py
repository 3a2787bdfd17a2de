"""ZeRO-1 and 2 of a model in float64, in float64: DeepSpeed takes it for a float32 one, whose sums, master weights and norm are float32."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime import engine
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn


class DoubleZeroOptimizer(DeepSpeedZeroOptimizer):
    """DeepSpeed's ZeRO-1 and 2 optimizer with float64 master weights and norm."""

    def _configure_master_weights(self, **settings: Any) -> torch.dtype:
        super()._configure_master_weights(**settings)
        return torch.float64

    def get_grad_norm_direct(self, gradients: Iterable[Tensor], params: Iterable[Tensor], norm_type: int = 2) -> Tensor:
        """The 2-norm over all ranks, in which a tied weight counts once."""
        real = (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False))
        return self._norm_of_all({p: g.double().square().sum() for g, p in zip(real, params, strict=False)})

    def complete_grad_norm_calculation_for_cpu_offload(self, params: Iterable[Tensor]) -> Tensor:
        """The same of gradients that are on the CPU."""
        norms = self.norm_for_param_grads
        known = {p: norms[self.get_param_id(p)] for p in params if self.get_param_id(p) in norms}
        return self._norm_of_all({parameter: norm.double().square() for parameter, norm in known.items()})

    def _norm_of_all(self, squares: Mapping[Tensor, Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter, square in squares.items():
            whole = self.model_parallel_rank == 0 or is_model_parallel_parameter(parameter)
            if whole and not getattr(parameter, PIPE_REPLICATED, False):
                total += square
        dist.all_reduce(total, group=self.dp_process_group)
        self._model_parallel_all_reduce(tensor=total, op=dist.ReduceOp.SUM)
        return total.sqrt()


class DoubleZero(DeepSpeedEngine):
    """The part of an engine that makes ZeRO's optimizer of a float64 model."""

    _double = False
    _making = False

    def _configure_distributed_model(self, model: nn.Module) -> None:
        super()._configure_distributed_model(model)
        zero = self.zero_optimization_stage() in (1, 2)
        found = torch.tensor(
            [any(p.dtype == torch.float64 for p in self.module.parameters())], device=self.device
        ).int()
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        self._double = zero and bool(found)

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """DeepSpeed's types of weights and of sums of gradients, float64 where that is the model's and no other sum is asked for."""
        weights, sums = super().get_data_types()
        return (weights, torch.float64) if self._double and self._config.grad_accum_dtype is None else (weights, sums)

    @property
    def communication_data_type(self) -> torch.dtype:
        """DeepSpeed's type in which gradients are averaged, float64 where that is the model's and no other is asked for."""
        given = self._config.communication_data_type
        wide = given is None and self._double and not self._making
        return torch.float64 if wide else super().communication_data_type

    @communication_data_type.setter
    def communication_data_type(self, value: torch.dtype) -> None:
        self._config.communication_data_type = value

    def _configure_zero_optimizer(self, optimizer: Any) -> Any:
        before = engine.DeepSpeedZeroOptimizer
        if self._double:
            bases = (DoubleZeroOptimizer,) if before is DeepSpeedZeroOptimizer else (DoubleZeroOptimizer, before)
            engine.DeepSpeedZeroOptimizer = type(before.__name__, bases, {})
        # DeepSpeed refuses float64 for stage 2, whose sums do not care.
        self._making = True
        try:
            made = super()._configure_zero_optimizer(optimizer)
        finally:
            engine.DeepSpeedZeroOptimizer, self._making = before, False
        if self._double:
            wanted = self.communication_data_type
            made.ipg_buckets[wanted] = made.ipg_buckets.pop(made.communication_data_type)
            made.communication_data_type = wanted
        return made
