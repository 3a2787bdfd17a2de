"""Layers that take a given time, as on a device of their own: a rank sleeps, so that ranks that share a CPU do not slow each other."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn


class Pace:
    """Seconds that this rank's layers take.

    A layer's forward pass takes `seconds`, its backward pass twice that, half for the input's gradient and half for the
    weight's; a slow rank takes `factor` times as long, and each pass of each microbatch a share of up to `jitter` more or less,
    drawn alike for whatever side runs. What a layer's arithmetic takes, and what a rank sleeps too long because others have the
    CPU, the next pass sleeps less.

    Args:
        seconds: of a layer's forward pass.
        jitter: see above.
        factor: of this rank.
    """

    def __init__(self, seconds: float, jitter: float = 0.0, factor: float = 1.0) -> None:
        self.seconds, self.jitter, self.factor = seconds, jitter, factor
        self._round, self._passes = 0, Counter[tuple[int, str]]()
        self._spent = 0.0

    def begin(self, number: int) -> None:
        """Round `number` begins."""
        self._round = number
        self._passes.clear()
        self._spent = 0.0

    def spend(self, layer: int, kind: str) -> None:
        """Take the time of a pass."""
        self._passes[layer, kind] += 1
        due = self.seconds * self.factor - self._spent
        if self.jitter:
            drawn = random.Random(f"{self._round} {layer} {kind} {self._passes[layer, kind]}").uniform(-1, 1)
            due += self.seconds * self.factor * self.jitter * drawn
        began = time.perf_counter()
        time.sleep(max(due, 0.0))
        self._spent = time.perf_counter() - began - due

    def worked(self, began: float) -> None:
        """A layer's arithmetic began then and ends now."""
        self._spent += time.perf_counter() - began


class _Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Work, kind: str) -> Tensor:
        ctx.layer, ctx.kind = layer, kind
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        ctx.layer.spend(ctx.kind)
        return gradients[0], None, None


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, layer: Work) -> Tensor:
        ctx.layer = layer
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        ctx.layer.began = time.perf_counter()
        return gradients[0], None


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
        self.began: float | None = None
        generator = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(torch.randn(width, width, generator=generator) / width)

    def spend(self, kind: str) -> None:
        """Take the time of a pass, less that of the arithmetic that has just begun."""
        if self.began is not None:
            self.pace.worked(self.began)
            self.began = None
        self.pace.spend(self.number, kind)

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) to (…, width)."""
        self.began = time.perf_counter()
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # else the first layer's backward pass would be the shorter
        weight = _Spend.apply(self.weight, self, "weight")
        x = _Spend.apply(x, self, "input")
        y = x + _Begin.apply(torch.tanh(x @ weight), self)
        self.spend("forward")
        return y


def loss_fn(y: Tensor, target: Tensor) -> Tensor:
    """The mean square."""
    return (y - target).square().mean()
