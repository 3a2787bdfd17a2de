"""Gradients that ranks have summed already, and that backward adds to or that are summed again: what is there counts once.

A shard over z is summed over the ranks of data alone and divided by gz·gdata, and a parameter of a scattered stream over those of x, too: of what is
a sum already the next one would make another number. So it is scaled by the inverse when backward adds to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from axonn_tp.comm.before_backward import before_backward


class _Kept:
    """A sum that lies in a parameter's gradient."""

    def __init__(self, parameter: Tensor, grad: Tensor, factor: float) -> None:
        self._parameter, self._grad, self.factor = ref(parameter), ref(grad), factor
        self._version = grad._version
        self._coming: Tensor | None = None
        self._hooks: tuple[RemovableHandle, ...] = ()

    @property
    def parameter(self) -> Tensor | None:
        """The parameter that has the gradient, if it is still there."""
        return self._parameter()

    def watch(self) -> None:
        """A backward pass begins, which may add to it."""
        parameter = self._parameter()
        if parameter is not None and parameter.requires_grad and not self._hooks:
            # A gradient comes by `torch.autograd.grad` as well, which adds it to nothing.
            self._hooks = (
                parameter.register_hook(self._comes),
                parameter.register_post_accumulate_grad_hook(self._came),
            )

    @property
    def untouched(self) -> bool:
        """True if the gradient is what the sum was."""
        return self._here() and self._parameter().grad._version == self._version  # type: ignore[union-attr]

    def end(self) -> None:
        """Look no longer."""
        for hook in self._hooks:
            hook.remove()

    def _here(self) -> bool:
        parameter = self._parameter()
        return parameter is not None and parameter.grad is not None and parameter.grad is self._grad()

    def _comes(self, grad: Tensor) -> None:
        self._coming = grad if self._here() else None

    @torch.no_grad()
    def _came(self, parameter: Tensor) -> None:
        forget(parameter)
        if self._coming is not None and self._here():
            assert parameter.grad is not None
            parameter.grad.mul_(self.factor).add_(self._coming, alpha=1 - self.factor)


_kept: dict[int, _Kept] = {}
"""Sums by their parameters' ids. Most sums are gone when the next pass begins (``zero_grad``), so nothing is hooked before."""


def keep(factors: Mapping[Tensor, float]) -> None:
    """Gradients have been summed.

    Args:
        factors: parameters, with that by which a sum is multiplied to come out of the next as it is.
    """
    before_backward(_watch)
    for parameter, factor in factors.items():
        if factor != 1 and parameter.grad is not None:
            _kept[id(parameter)] = _Kept(parameter, parameter.grad, factor)


def _watch(*_: Any) -> None:
    for number, kept in list(_kept.items()):
        parameter = kept.parameter
        if parameter is None or parameter.grad is None:
            _kept.pop(number).end()
        else:
            kept.watch()


def _of(parameter: Tensor) -> _Kept | None:
    kept = _kept.get(id(parameter))
    return kept if kept is not None and kept.parameter is parameter else None


@torch.no_grad()
def forget(parameter: Tensor) -> bool:
    """The parameter's gradient is no sum any more, or somebody else keeps it; true if it was one."""
    kept = _of(parameter)
    if kept is not None:
        _kept.pop(id(parameter)).end()
    return kept is not None


@torch.no_grad()
def scale_untouched(parameters: Iterable[Tensor]) -> None:
    """Gradients are about to be summed, some of them again."""
    found = [(parameter, kept) for parameter in parameters if (kept := _of(parameter)) is not None]
    # Gradients that lie in one piece of memory have one version.
    for parameter, kept in [(parameter, kept) for parameter, kept in found if kept.untouched]:
        parameter.grad.mul_(kept.factor)  # type: ignore[union-attr]
    for parameter, _ in found:
        forget(parameter)
