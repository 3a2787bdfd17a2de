"""Layers that take a given time, as on a device of their own: a rank sleeps, so that ranks that share a CPU do not slow each other."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn


class Pace:
    """How long this rank's layers take.

    A layer's forward pass takes `seconds`, its backward pass twice that, half for the input's gradient and half for the
    weight's; a slow rank takes `factor` times as long, and each pass of each microbatch a share of up to `jitter` more or less,
    drawn alike for whatever side runs.

    Args:
        seconds: of a layer's forward pass.
        jitter: see above.
        factor: of this rank.
    """

    def __init__(self, seconds: float, jitter: float = 0.0, factor: float = 1.0) -> None:
        self.seconds, self.jitter, self.factor = seconds, jitter, factor
        self._round, self._passes = 0, Counter[tuple[int, str]]()

    def begin(self, number: int) -> None:
        """Round `number` begins."""
        self._round = number
        self._passes.clear()

    def spend(self, layer: int, kind: str) -> None:
        """Take the time of a pass."""
        self._passes[layer, kind] += 1
        drawn = random.Random(f"{self._round} {layer} {kind} {self._passes[layer, kind]}").uniform(-1, 1)
        time.sleep(self.seconds * self.factor * (1 + self.jitter * drawn))


class _Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pace: Pace, layer: int, forward: bool) -> Tensor:
        ctx.pace, ctx.layer, ctx.kind = pace, layer, "input" if forward else "weight"
        if forward:
            pace.spend(layer, "forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        ctx.pace.spend(ctx.layer, ctx.kind)
        return gradients[0], None, None, None


class Work(nn.Module):
    """A residual layer on (…, width) that takes its time.

    Args:
        pace: of this rank.
        number: of the layer in the model, from which its weights are drawn.
        width: features.
    """

    def __init__(self, pace: Pace, number: int, width: int) -> None:
        super().__init__()
        self.pace, self.number = pace, number
        generator = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(torch.randn(width, width, generator=generator) / width)

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) to (…, width)."""
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # else the first layer's backward pass would be the shorter
        weight = _Spend.apply(self.weight, self.pace, self.number, False)
        x = _Spend.apply(x, self.pace, self.number, True)
        return x + torch.tanh(x @ weight)


def loss_fn(y: Tensor, target: Tensor) -> Tensor:
    """The mean square."""
    return (y - target).square().mean()
