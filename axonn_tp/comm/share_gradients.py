"""Gradients of parameters that layers use on a rank's share of the tokens, such as those of a norm in a scattered stream.

They are summed over the ranks that hold the other shares. What a penalty on such a parameter gives it, outside of its layer, is whole on every
one of these ranks, and the sum would count it once for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce

import torch
from torch import Tensor, nn

from axonn_tp.comm.shard_gradients import OwnRead, Watch, is_sum, watched
from axonn_tp.comm.unplanned_gradients import GRADIENTS_OF_GRADIENTS


class _Partial(Watch):
    """Divides what comes to a parameter past its layer by the ranks over which its gradient is summed."""

    def __init__(self, parameter: Tensor, ranks: int) -> None:
        self._ranks = ranks
        super().__init__(parameter)

    def _came(self, grad: Tensor) -> Tensor | None:
        if torch.is_grad_enabled():
            raise ValueError(GRADIENTS_OF_GRADIENTS)
        given = self._taken()
        if given is None or (len(given) == 1 and given[0] is grad):
            return None
        if not given:
            return grad / self._ranks
        share = reduce(torch.add, [one.to(grad.dtype) for one in given])
        return share + (grad - share) / self._ranks


class _OnShares(Watch):
    """Refuses, in one pass, what comes to a parameter past its uses on shares."""

    def __init__(self, parameter: Tensor, said: str) -> None:
        self._said = said
        super().__init__(parameter)

    @torch.no_grad()
    def _came(self, grad: Tensor) -> None:
        given = self._taken()
        if not given or (grad.is_cuda and torch.cuda.is_current_stream_capturing()) or not grad.isfinite().all():
            return
        self.end()
        if not is_sum(given, grad):
            raise ValueError(self._said)


def refuse_other_uses(parameter: nn.Parameter, said: str) -> list[Watch]:
    """End the next backward pass that brings a parameter gradients from elsewhere beside those of its uses on shares.

    Args:
        parameter: used by `axonn_tp.comm.shard_gradients.OwnRead` where it meets shares.
        said: the sentence.

    Returns:
        What looks, where nothing looks at the parameter yet.
    """
    if parameter.requires_grad and parameter.is_leaf and not watched(parameter):
        return [_OnShares(parameter, said)]
    return []


def read_on_share(parameter: Tensor, ranks: int) -> Tensor:
    """A parameter as its layer uses it on this rank's share of the tokens.

    Args:
        parameter: of the layer.
        ranks: over which its gradient will be summed because they have other shares.
    """
    if ranks == 1 or not parameter.requires_grad or not torch.is_grad_enabled():
        return parameter
    if parameter.is_leaf and not watched(parameter):
        _Partial(parameter, ranks)
    return OwnRead.apply(parameter)


@contextmanager
def reads_on_share(module: nn.Module, names: dict[str, int]) -> Iterator[None]:
    """Inside, code of the module finds its parameters as `read_on_share` gives them.

    Args:
        module: whose own parameters they are.
        names: of parameters, with the ranks that sum their gradients.
    """
    held = {name: parameter for name in names if (parameter := module._parameters.get(name)) is not None}
    try:
        for name, parameter in held.items():
            module._parameters[name] = read_on_share(parameter, names[name])  # type: ignore[assignment]
        yield
    finally:
        module._parameters.update(held)
