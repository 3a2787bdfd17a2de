"""What DeepSpeed's engine asks of an optimizer that does its own gradient sums, clipping and loss scaling."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

Groups = list[dict[str, Any]]


def loss_scaler(engine: DeepSpeedEngine, dtype: torch.dtype) -> Any:
    """DeepSpeed's scaler of losses, as the engine's configuration has it."""
    return CreateLossScaler(
        dtype=dtype,
        static_loss_scale=engine.loss_scale(),
        dynamic_scaling=engine.dynamic_loss_scale(),
        dynamic_loss_args=engine.dynamic_loss_scale_args(),
    )


class WrappedOptimizer(ZeROOptimizer):
    """What the engine holds, around the optimizer that does the work.

    Args:
        scaler: DeepSpeed's loss scaler; None where the loss is not scaled.
    """

    def __init__(self, scaler: Any) -> None:
        super().__init__()
        self.loss_scaler = scaler
        self.custom_loss_scaler, self.external_loss_scale, self.torch_autocast_gradscaler = False, None, None
        self._global_grad_norm: float | None = None

    def _take_over(self, basic: torch.optim.Optimizer, inner: Any) -> None:
        """Have `inner` go on where `basic`, over the same parameters, is; a scheduler made for that goes on working."""
        self._inner = inner
        if basic.state:
            inner.load_state_dict(basic.state_dict())
            basic.state.clear()
        basic.param_groups = inner.param_groups
        # Torch's schedulers warn when the optimizer that they know has not stepped.
        basic._opt_called = True  # type: ignore[attr-defined]

    @property
    def param_groups(self) -> Groups:
        """Parameters and hyperparameters."""
        return self._inner.param_groups

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped."""
        return self._inner.overflow

    @property
    def cur_scale(self) -> float:
        """The loss scale in use."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale moves."""
        return self.loss_scaler is not None and self.loss_scaler.dynamic
