"""DeepSpeed's engine with `samo.Optimizer` inside: gradients, master weights and optimizer state of kept weights only.

It is stage 0 of ZeRO to DeepSpeed, whose own gradient sum does not run: SAMO sums compressed gradients while backward does.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import samo
from axonn_plugins import __version__
from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.deepspeed.agreement import compare
from axonn_plugins.hosts.deepspeed.checkpoint.samo import SamoCheckpoints
from axonn_plugins.hosts.deepspeed.optim.samo import SamoOptimizer, torch_adam
from axonn_plugins.hosts.deepspeed.optim.wrapped import loss_scaler
from axonn_plugins.hosts.deepspeed.samo.pruning import Pruning


class SamoEngine(SamoCheckpoints):
    """`DeepSpeedEngine` that prunes and trains compressed; what `deepspeed.initialize` returns under ``axonn.samo``."""

    def __init__(
        self, args: Any, model: nn.Module, optimizer: Any = None, *rest: Any, config_class: Any = None, **keywords: Any
    ) -> None:
        self._samo = config_class.axonn.samo
        compare(model, config_class, optimizer, keywords)
        _check_model(model)
        if optimizer is None and not config_class.optimizer_name:
            raise ConfigError(
                "axonn.samo compresses an optimizer's state, and there is no optimizer; add the section optimizer, or pass one to "
                "deepspeed.initialize"
            )
        super().__init__(args, model, optimizer, *rest, config_class=config_class, **keywords)

    # Optimizer

    def _configure_basic_optimizer(self, model_parameters: list[Any]) -> torch.optim.Optimizer:
        """Torch's Adam for DeepSpeed's, which need not be compiled then."""
        name = self.optimizer_name()
        settings = dict(self.optimizer_params() or {})
        if name not in ("adam", "adamw") or "max_grad_norm" in settings:
            return super()._configure_basic_optimizer(model_parameters)
        return torch_adam(model_parameters, name == "adamw" or settings.get("adam_w_mode", True), settings)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: list[Any]) -> None:
        super()._configure_optimizer(client_optimizer, model_parameters)
        if not isinstance(self.optimizer, SamoOptimizer):
            self.optimizer = self._compressed(self.optimizer, None)
        self.basic_optimizer = self.optimizer.samo

    def _configure_fp16_optimizer(self, optimizer: Any, low_precision_dtype: torch.dtype) -> SamoOptimizer:
        scaler = loss_scaler(self, low_precision_dtype)
        return self._compressed(optimizer, scaler)

    def _compressed(self, basic: torch.optim.Optimizer, scaler: Any) -> SamoOptimizer:
        trained = {parameter for group in basic.param_groups for parameter in group["params"]}
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        self._pruning = self._make_pruning(trained)
        masks = self._pruning.first()
        made = SamoOptimizer(
            basic,
            names,
            masks,
            self.data_parallel_group,
            self._samo.shard,
            scaler,
            self.gradient_clipping(),
            self._norm_of_all,
        )
        if masks is not None:
            self._pruning.take(masks)
            self._report(masks, made.samo)
        return made

    # How the squared norms of gradients, by name, become that of all; None: their sum.
    _norm_of_all: Any = None

    def _make_pruning(self, trained: set[nn.Parameter]) -> Pruning:
        return Pruning(self._samo, self.module, trained, self.device)

    def _scheduler_from_config(self, optimizer: Any) -> Any:
        return super()._scheduler_from_config(self.optimizer.samo)

    # Gradients

    def _set_reduction(self) -> None:
        self.optimizer.reduce_in_backward(self.is_gradient_accumulation_boundary() and not self.inside_no_sync_ctxt)

    def backward(self, *inputs: Any, **keywords: Any) -> Any:  # noqa: D102
        self._set_reduction()
        return super().backward(*inputs, **keywords)

    def _backward_prologue(self) -> None:
        self._set_reduction()
        super()._backward_prologue()

    def buffered_allreduce_fallback(self, *rest: Any, **keywords: Any) -> None:
        """Nothing to do: SAMO sums gradients while backward runs, and the rest when it steps."""

    def clip_fp32_gradients(self) -> None:
        """Nothing to do: SAMO clips when it steps."""

    def zero_grad(self) -> None:
        """Forget gradients that no step has consumed."""
        self.optimizer.zero_grad()
        super().zero_grad()

    # Pruning

    def _take_model_step(self, *rest: Any, **keywords: Any) -> None:
        super()._take_model_step(*rest, **keywords)
        masks = self._pruning.after(self.global_steps)
        if masks is not None:
            self._prune(masks)

    def _prune(self, masks: dict[str, Tensor]) -> None:
        self.optimizer.prune(masks)
        self._pruning.take(masks)
        self._report(masks, self.optimizer.samo)

    def _report(self, masks: dict[str, Tensor], optimizer: samo.Optimizer) -> None:
        """Sparsity by layer, on rank 0."""
        if dist.get_rank() == 0:
            table = samo.sparsity_table(masks, self.module)
            size = f"{optimizer.nbytes / 2**20:,.1f} MiB of weights, gradients and state"
            print(
                f"axonn {__version__}: SAMO: pruned after step {self.global_steps}; {size}\n{table}",
                file=sys.stderr,
                flush=True,
            )


def _check_model(model: nn.Module) -> None:
    from deepspeed.moe.layer import MoE

    for name, module in model.named_modules():
        if isinstance(module, MoE):
            raise ConfigError(
                f"layer {name} is a DeepSpeed MoE, whose experts differ between ranks and do not go with axonn.samo yet; leave the block out"
            )
