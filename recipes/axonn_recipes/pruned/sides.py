"""The two sides: torch's DistributedDataParallel with dense AdamW, and SAMO."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

import samo
from axonn_recipes.pruned.plan import Plan
from samo.memory import measured


class Side(Protocol):
    """A side as the training loop sees it."""

    @property
    def model(self) -> nn.Module:
        """To be called; its gradients are averaged over the ranks as backward runs."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """Backward passes in the ``with`` block only accumulate."""

    def step(self, lr: float) -> None:
        """Update the weights with clipped gradients, and forget these."""

    def state_bytes(self) -> int:
        """Weights, gradients and optimizer state on this rank in a step, counted from the tensors."""


class Dense:
    """DistributedDataParallel and torch's fused AdamW; in 16 bits with weights and gradients in 32 bits besides: 20φ bytes."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._clip = plan.clip
        self._parameters = list(model.parameters())
        self._masters = [
            p if p.dtype == torch.float32 else p.detach().float().requires_grad_() for p in self._parameters
        ]
        self._optimizer = torch.optim.AdamW(self._masters, **_adamw(plan))
        self.model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
        self._bytes = 0

    def no_sync(self) -> AbstractContextManager[Any]:  # noqa: D102
        return self.model.no_sync()

    def step(self, lr: float) -> None:  # noqa: D102
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float()
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self._masters, self._clip)
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        self._bytes = self._count()
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
                    master.grad = None
        self.model.zero_grad()

    def _count(self) -> int:
        tensors = {id(tensor): tensor for tensor in [*self._parameters, *self._masters]}.values()
        state = [value for values in self._optimizer.state.values() for value in values.values()]
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        return sum(tensor.nbytes for tensor in [*tensors, *gradients, *state])

    def state_bytes(self) -> int:  # noqa: D102
        return self._bytes


class Pruned:
    """SAMO: dense until `prune`, then with the state of what is kept.

    Args:
        model: to train.
        plan: how.
        alone: without the other ranks.
    """

    def __init__(self, model: nn.Module, plan: Plan, alone: bool = False) -> None:
        self.model = model
        self._optimizer = samo.Optimizer(
            lambda groups: torch.optim.AdamW(groups, **_adamw(plan)),
            model,
            max_norm=plan.clip,
            group=None if alone else dist.group.WORLD,
        )

    def no_sync(self) -> AbstractContextManager[Any]:  # noqa: D102
        return self._optimizer.no_sync()

    def prune(self, masks: Mapping[str, Tensor]) -> None:
        """Prune from now on."""
        self._optimizer.prune(masks)

    def step(self, lr: float) -> None:  # noqa: D102
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def state_bytes(self) -> int:  # noqa: D102
        return measured(self._optimizer).total


def _adamw(plan: Plan) -> dict[str, Any]:
    return {"lr": plan.lr, "betas": (0.9, plan.beta2), "weight_decay": plan.weight_decay, "fused": True}
