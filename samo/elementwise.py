"""Whether an optimizer updates each element by itself, as compressed state needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def require_elementwise(factory: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]) -> None:
    """Refuse an optimizer whose update of an element depends on the others.

    Two steps on four elements are compared with two steps on two of them.

    Raises:
        ValueError: they differ, its step needs a closure, or the factory returned no optimizer.
    """
    weights, gradients = [0.5, -1.0, 2.0, 0.25], ([0.1, -0.3, 0.7, 2.0], [0.4, 0.2, -0.9, -1.0])
    # What needs a device of its own or more than one dim is judged by its first step.
    try:
        whole = _train(factory, weights, gradients)
        part = _train(factory, weights[1:3], [gradient[1:3] for gradient in gradients])
    except (RuntimeError, AssertionError, NotImplementedError):
        return
    if not torch.allclose(whole[1:3], part, rtol=1e-5, atol=0):
        name = type(factory([{"params": [torch.zeros(1)]}])).__name__
        raise ValueError(
            f"{name} is not element-wise: what it does to one weight depends on others, so it cannot work on the kept ones "
            "alone; use an optimizer such as Adam, AdamW or SGD"
        )


def _train(
    factory: Callable[[list[dict[str, Any]]], Any], weights: Sequence[float], gradients: Sequence[Sequence[float]]
) -> Tensor:
    weight = torch.tensor(weights)
    optimizer = factory([{"params": [weight]}])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"the factory returned {type(optimizer).__name__}, not a torch optimizer; pass a function such as "
            "lambda groups: torch.optim.AdamW(groups, lr=1e-3)"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"{type(optimizer).__name__} computes the loss several times a step and looks at all weights together, so it cannot work "
            "on the kept ones in tiles; use an optimizer such as Adam, AdamW or SGD"
        )
    for gradient in gradients:
        weight.grad = torch.tensor(gradient)
        optimizer.step()
    return weight.detach()
