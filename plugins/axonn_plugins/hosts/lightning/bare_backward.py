"""Passes of torch's own autograd through Fabric's modules: gradients of gradients may be taken, gradients of parameters are Fabric's."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

import torch
from lightning.fabric import wrappers
from lightning.fabric.plugins import Precision
from lightning_utilities import is_overridden
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge


def allow_penalties(strategy: type) -> None:
    """Under strategies of this type `torch.autograd.grad` is free to pass through a module, as in one process.

    Fabric's own guard, which sees outputs alone, ends every pass that `Fabric.backward` has not begun.
    """
    original = wrappers._FabricModule._register_backward_hook
    if getattr(original, "axonn", False):
        return

    @wraps(original)
    def _register_backward_hook(self: Any, tensor: Tensor) -> Tensor:
        scaled = any(
            is_overridden(method, self._strategy.precision, parent=Precision)
            for method in ("pre_backward", "backward", "post_backward")
        )
        if scaled or not tensor.requires_grad or not isinstance(self._strategy, strategy):
            return original(self, tensor)
        tensor.register_hook(partial(_guard, self._forward_module))
        return tensor

    _register_backward_hook.axonn = True  # type: ignore[attr-defined]
    wrappers._FabricModule._register_backward_hook = _register_backward_hook


def _guard(module: nn.Module, grad: Tensor) -> None:
    """End a pass that reaches parameters whose gradients `Fabric.backward` would have summed."""
    if not wrappers._in_fabric_backward:
        wrappers._backward_hook(any(_reached(parameter) for parameter in module.parameters()))


def _reached(parameter: nn.Parameter) -> bool:
    try:
        return parameter.requires_grad and torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # what torch.autograd.grad returns
        return True
