"""DeepSpeed's LAMB in torch's operations: its own is a CUDA kernel that has whole weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Lamb(torch.optim.Optimizer):
    """You et al. (arXiv 1904.00962), as `deepspeed.ops.lamb.FusedLamb` computes it.

    Args:
        params: as any optimizer's.
        lr: learning rate.
        bias_correction: of both averages, in the learning rate.
        betas: of the averages.
        eps: added to the root of the second average.
        eps_inside_sqrt: added before the root.
        weight_decay: decoupled, within what the trust ratio scales.
        max_coeff: most of the trust ratio.
        min_coeff: least of it.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "eps_inside_sqrt": eps_inside_sqrt,
                "weight_decay": weight_decay,
                "max_coeff": max_coeff,
                "min_coeff": min_coeff,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        average = state["exp_avg"].lerp_(gradient, 1 - beta1)
        squares = state["exp_avg_sq"].lerp_(gradient.square(), 1 - beta2)
        root = (squares + group["eps"]).sqrt() if group["eps_inside_sqrt"] else squares.sqrt() + group["eps"]
        update = average / root + group["weight_decay"] * parameter
        weights, length = parameter.norm(), update.norm()
        ratio = (weights / length).clamp(group["min_coeff"], group["max_coeff"])
        ratio = torch.where((weights > 0) & (length > 0), ratio, 1.0)
        rate = group["lr"]
        if group["bias_correction"]:
            rate *= (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
        parameter.sub_(rate * ratio * update)
