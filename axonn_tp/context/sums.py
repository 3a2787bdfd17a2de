"""Sums over the tokens of a sequence that several ranks share, so that a loss is that of all its tokens on each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from axonn_tp.comm.collectives import all_reduce
from axonn_tp.grid.mesh import Axes


class Tokens(Protocol):
    """The tokens of the call under way.

    Attributes:
        losses: how many sums over all of them were made.
    """

    losses: int

    @property
    def mesh(self) -> Axes:
        """Has the axis ``"sequence"``."""

    @property
    def rows(self) -> int:
        """This rank's tokens of all samples."""

    def without_padding(self, targets: Tensor, ignored: int) -> Tensor:
        """Targets of which those of padding are `ignored`."""

    def all_rows(self, rows: Tensor, times: int = 1) -> Tensor:
        """Rows of all ranks' tokens."""

    def own_rows(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where this rank's are among them, and which are padding."""


_now: list[tuple[Tokens | None, Callable[[], AbstractContextManager]]] = []
_noting: list[list[Tensor]] = []


@contextmanager
def sharing(tokens: Tokens | None, again: Callable[[], AbstractContextManager] | None = None) -> Iterator[None]:
    """Inside, losses are over these tokens; where None, each rank's numbers are its own, and nothing is replaced.

    Args:
        tokens: of the call under way.
        again: the context in which what is computed inside is computed again; by default this one.
    """
    _now.append((tokens, again or partial(sharing, tokens)))
    try:
        yield
    finally:
        _now.pop()


def current() -> Tokens | None:
    """The tokens of the call under way; None where every rank has all."""
    return _now[-1][0] if _now else None


def computed_in() -> Callable[[], AbstractContextManager] | None:
    """The context in which what is computed now is computed again; None outside of all `sharing`."""
    return _now[-1][1] if _now else None


class _Sum(torch.autograd.Function):
    # Gradients are averaged over all ranks of z: of a sum over some of them each has its own part, times their number.
    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: Axes) -> Tensor:
        ctx.ranks = mesh.size("sequence")
        return all_reduce(part, mesh, "sequence")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.ranks, None


class _Alike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.ranks, None


def of_all(value: Tensor, tokens: Tokens) -> Tensor:
    """A loss that every rank has computed of all tokens, through `Tokens.all_rows`: its gradient is one of as many that are averaged."""
    return _Alike.apply(value, tokens.mesh.size("sequence"))


def over_sequence(part: Tensor) -> Tensor:
    """The sum of this rank's part and those of all that share its sequences; itself where none do."""
    tokens = current()
    if tokens is None:
        return part
    tokens.losses += 1
    return _Sum.apply(part, tokens.mesh)


def real_targets(targets: Tensor, ignored: int) -> Tensor:
    """Targets of which those of a share's padding are `ignored`."""
    for noted in _noting:
        noted.append(targets.detach())
    tokens = current()
    return targets if tokens is None else tokens.without_padding(targets, ignored)


@contextmanager
def noting_targets() -> Iterator[list[Tensor]]:
    """Inside, targets of losses are noted as they come, one tensor a loss."""
    _noting.append([])
    try:
        yield _noting[-1]
    finally:
        _noting.pop()
