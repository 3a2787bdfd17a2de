"""Sums over the tokens of a sequence that several ranks share, so that a loss is that of all its tokens on each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from axonn_tp.comm.collectives import all_reduce
from axonn_tp.grid.mesh import Axes


class Tokens(Protocol):
    """The tokens of the call under way."""

    @property
    def mesh(self) -> Axes:
        """Has the axis ``"sequence"``."""

    def without_padding(self, targets: Tensor, ignored: int) -> Tensor:
        """Targets of which those of padding are `ignored`."""


_now: list[Tokens | None] = []


@contextmanager
def sharing(tokens: Tokens | None) -> Iterator[None]:
    """Inside, losses are over these tokens; over each rank's own where None."""
    _now.append(tokens)
    try:
        yield
    finally:
        _now.pop()


def current() -> Tokens | None:
    """The tokens of the call under way; None where every rank has all."""
    return _now[-1] if _now else None


class _Sum(torch.autograd.Function):
    # Gradients are averaged over all ranks of z: of a sum over some of them each has its own part, times their number.
    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: Axes) -> Tensor:
        ctx.ranks = mesh.size("sequence")
        return all_reduce(part, mesh, "sequence")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.ranks, None


def over_sequence(part: Tensor) -> Tensor:
    """The sum of this rank's part and those of all that share its sequences; itself where none do."""
    tokens = current()
    return part if tokens is None else _Sum.apply(part, tokens.mesh)


def real_targets(targets: Tensor, ignored: int) -> Tensor:
    """Targets of which those of a share's padding are `ignored`."""
    tokens = current()
    return targets if tokens is None else tokens.without_padding(targets, ignored)
