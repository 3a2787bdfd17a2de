"""A double of emerging_optimizers: as much as Megatron's Muon takes of it, by its pages, in the type of the gradients."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """Momentum, of which each update is orthogonalised."""

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum_beta: float,
        weight_decay: float,
        *,
        use_nesterov: bool,
        weight_decay_method: str,
        fp32_matmul_prec: str,
        scaled_orthogonalize_fn: Callable[..., Tensor],
    ) -> None:
        assert weight_decay_method == "decoupled"
        self.use_nesterov, self.scaled_orthogonalize_fn = use_nesterov, scaled_orthogonalize_fn
        super().__init__(params, {"lr": lr, "momentum_beta": momentum_beta, "weight_decay": weight_decay})

    def orthogonalize(self, p: Tensor, grad: Tensor, **group: Any) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                momentum.lerp_(p.grad, 1 - group["momentum_beta"])
                update = p.grad.lerp(momentum, group["momentum_beta"]) if self.use_nesterov else momentum
                others = {key: value for key, value in group.items() if key != "params"}
                p.add_(self.orthogonalize(p, update, **others), alpha=-group["lr"])


def get_muon_scale_factor(size_out: int, size_in: int, mode: str) -> float:
    return {
        "spectral": max(size_out, size_in) ** 0.5,
        "unit_rms_norm": (size_out / size_in) ** 0.5,
        "shape_scaling": max(1, size_out / size_in) ** 0.5,
    }[mode]


def newton_schulz_tp(
    x: Tensor, steps: int, coefficient_type: str, tp_group: Any, partition_dim: int | None, mode: str
) -> Tensor:
    assert partition_dim is None or tp_group.size() == 1, "Megatron's own tensor parallelism is not asked for"
    rows = x.mT if x.size(-2) > x.size(-1) else x
    rows, (a, b, c) = rows / rows.norm(), COEFFICIENTS
    for _ in range(steps):
        gram = rows @ rows.mT
        rows = a * rows + (b * gram + c * gram @ gram) @ rows
    return rows.mT if x.size(-2) > x.size(-1) else rows


def install() -> None:
    """Have Megatron find the double; this process keeps it."""
    if "emerging_optimizers" in sys.modules:
        return
    contents: dict[str, dict[str, Any]] = {
        "emerging_optimizers": {},
        "emerging_optimizers.orthogonalized_optimizers": {
            "OrthogonalizedOptimizer": OrthogonalizedOptimizer,
            "get_muon_scale_factor": get_muon_scale_factor,
        },
        "emerging_optimizers.orthogonalized_optimizers.muon_utils": {"newton_schulz_tp": newton_schulz_tp},
    }
    for name, attributes in contents.items():
        made = ModuleType(name)
        made.__spec__, made.__path__ = ModuleSpec(name, None), []
        vars(made).update(attributes)
        sys.modules[name] = made
    # Megatron asked for it when it was imported.
    import megatron.core.optimizer

    vars(megatron.core.optimizer).pop("muon", None)
    sys.modules.pop("megatron.core.optimizer.muon", None)
    importlib.import_module("megatron.core.optimizer.muon")
