"""Kernels whose backward adds up in another order on each rank and in each call, as some of an accelerator's do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor


class Noisy(torch.autograd.Function):
    """The identity, whose gradient is rounded otherwise each time."""

    draws = torch.Generator()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        rounding = torch.rand(grad.shape, generator=Noisy.draws, dtype=torch.float64).to(grad)
        return grad * (1 + 8 * torch.finfo(grad.dtype).eps * rounding)


@contextmanager
def noisy(*functions: tuple[Any, str]) -> Iterator[None]:
    """Have functions, given by what holds them and their names, be such kernels."""
    Noisy.draws.manual_seed(dist.get_rank())

    def noisily(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *given, **named: Noisy.apply(function(*given, **named))

    with ExitStack() as stack:
        for holder, name in functions:
            stack.enter_context(patch.object(holder, name, noisily(getattr(holder, name))))
        yield
