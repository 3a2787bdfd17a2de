"""DeepSpeed's engine with `BucketedOptimizer` inside; stage 0 of ZeRO to DeepSpeed, whose own gradient sum does not run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from torch import Tensor, nn

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.deepspeed.agreement import compare
from axonn_plugins.hosts.deepspeed.checkpoint.checked import CheckedCheckpoints
from axonn_plugins.hosts.deepspeed.optim.states import Scale, factory_of, torch_adam
from axonn_plugins.hosts.deepspeed.optim.wrapped import WrappedOptimizer, loss_scaler
from axonn_plugins.pipeline.bucketed_optimizer import BucketedOptimizer

KEY = "axonn.offload_optimizer"


class OffloadedOptimizer(WrappedOptimizer):
    """What the engine holds as its optimizer.

    Args:
        basic: the optimizer that the configuration or the script named; its parameter groups become the bucketed one's, so
            that a scheduler made for it goes on working, and its state is taken over.
        scaler: DeepSpeed's loss scaler; None where the loss is not scaled.
        clip_grad: largest norm of the gradient, 0 for no clipping.
        options: of `BucketedOptimizer`.

    Attributes:
        bucketed: does the work.

    Raises:
        ConfigError: the optimizer is not element-wise.
    """

    def __init__(self, basic: torch.optim.Optimizer, scaler: Any, clip_grad: float, **options: Any) -> None:
        super().__init__(scaler)
        self._scale = None if scaler is None else Scale(scaler)
        factory = factory_of(basic, KEY, fused=torch.cuda.is_available())
        groups = [{k: v for k, v in group.items() if k != "param_names"} for group in basic.param_groups]
        # A scaled gradient's norm is always wanted: it tells whether there was an overflow.
        most = clip_grad or (math.inf if scaler is not None else None)
        try:
            self.bucketed = BucketedOptimizer(factory, groups, max_norm=most, **options)
        except ValueError as error:
            raise ConfigError(f"{KEY}: {error}") from None
        self._take_over(basic, self.bucketed)

    def step(self, closure: Any = None) -> None:
        """Average, unscale, clip and update; skip the step when a gradient is not finite."""
        if self._scale is not None:
            self.bucketed.reduce()
            self.bucketed.grad_scale = torch.tensor(self.cur_scale)
        self.bucketed.step()
        if self._scale is not None:
            self._scale.update(self.overflow)
        norm = self.bucketed.total_norm
        self._global_grad_norm = None if norm is None else float("inf") if self.overflow else norm.item()

    def backward(self, loss: Tensor, retain_graph: bool = False, **keywords: Any) -> None:
        """Backward of the scaled loss; older engines of DeepSpeed call this, newer ones scale the loss themselves."""
        (loss * self.cur_scale).backward(retain_graph=retain_graph)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.bucketed.zero_grad()

    def refresh_fp32_params(self) -> None:
        """Set the float32 weights from the parameters."""
        self.bucketed.refresh_masters()

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's, with weights as "masters" and the loss scaler's numbers."""
        scale = None if self._scale is None else self._scale.state_dict()
        return {**self.bucketed.state_dict(), "loss_scaler": scale}

    def load_state_dict(self, state_dict: dict[str, Any], load_optimizer_states: bool = True) -> None:
        """What `state_dict` returned, or a torch optimizer's.

        Raises:
            ConfigError: it is of other parameters, or none of these.
        """
        if "param_groups" not in state_dict:
            raise ConfigError(
                f"this checkpoint's optimizer state is of another wrapper of DeepSpeed's, which {KEY} cannot read; load it with "
                "load_optimizer_states=False"
            )
        if not load_optimizer_states:
            self.refresh_fp32_params()
            return
        scale = state_dict.get("loss_scaler")
        if scale is not None and self._scale is not None:
            self._scale.load_state_dict(scale)
        try:
            self.bucketed.load_state_dict({k: v for k, v in state_dict.items() if k != "loss_scaler"})
        except ValueError as error:
            raise ConfigError(f"{KEY}: {error}") from None


class OffloadEngine(CheckedCheckpoints):
    """`DeepSpeedEngine` under ``axonn.offload_optimizer``, or the part of a pipeline's engine that obeys it."""

    optimizer: OffloadedOptimizer
    _counts: Callable[[Tensor], bool]  # a pipeline's

    def __init__(
        self, args: Any, model: nn.Module, optimizer: Any = None, *rest: Any, config_class: Any = None, **keywords: Any
    ) -> None:
        self._offload = config_class.axonn.offload_optimizer
        compare(model, config_class, optimizer, keywords)
        for name, module in model.named_modules():
            if isinstance(module, MoE):
                raise ConfigError(
                    f"layer {name} is a DeepSpeed MoE, whose experts differ between ranks; give axonn the key ted, which knows them"
                )
        super().__init__(args, model, optimizer, *rest, config_class=config_class, **keywords)

    def _configure_basic_optimizer(self, model_parameters: list[Any]) -> torch.optim.Optimizer:
        """Torch's Adam for DeepSpeed's, which need not be compiled then."""
        name, settings = self.optimizer_name(), dict(self.optimizer_params() or {})
        if name not in ("adam", "adamw"):
            return super()._configure_basic_optimizer(model_parameters)
        return torch_adam(model_parameters, name == "adamw" or settings.get("adam_w_mode", True), settings, KEY)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: list[Any]) -> None:
        super()._configure_optimizer(client_optimizer, model_parameters)
        if not isinstance(self.optimizer, OffloadedOptimizer):
            self.optimizer = self._offloaded(self.optimizer, None)
        self.basic_optimizer = self.optimizer.bucketed

    def _configure_fp16_optimizer(self, optimizer: Any, low_precision_dtype: torch.dtype) -> OffloadedOptimizer:
        if low_precision_dtype != torch.float16:
            return self._offloaded(optimizer, None)
        scaler = loss_scaler(self, low_precision_dtype)
        return self._offloaded(optimizer, scaler)

    def _configure_bf16_optimizer(self, optimizer: Any) -> OffloadedOptimizer:
        return self._offloaded(optimizer, None)

    def _offloaded(self, basic: torch.optim.Optimizer, scaler: Any) -> OffloadedOptimizer:
        group = self.mpu.get_data_parallel_group() if self.pipeline_parallelism else self.data_parallel_group
        return OffloadedOptimizer(
            basic,
            scaler,
            self.gradient_clipping(),
            bucket_size=self._offload.bucket_size,
            coarsening=self._offload.coarsening,
            group=group if dist.get_world_size(group) > 1 else None,
            norm=self._square_of_all if self.pipeline_parallelism else None,
        )

    def _square_of_all(self, squares: dict[str, Tensor]) -> Tensor:
        """The square of all stages' norm, in which a weight counts once."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        counted = [square for number, square in squares.items() if self._counts(parameters[int(number)])]
        total = torch.stack(counted).sum() if counted else torch.zeros((), device=self.device)
        dist.all_reduce(total, group=self.mpu.get_model_parallel_group())
        return total

    def _scheduler_from_config(self, optimizer: Any) -> Any:
        return super()._scheduler_from_config(self.optimizer.bucketed)

    def buffered_allreduce_fallback(self, *rest: Any, **keywords: Any) -> None:
        """Nothing to do: the optimizer averages gradients when it steps."""

    def clip_fp32_gradients(self) -> None:
        """Nothing to do: the optimizer clips when it steps."""
