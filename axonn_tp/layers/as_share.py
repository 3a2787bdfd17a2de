"""An input whose shape reads as that of a share, for code that takes the widths of what a layer gives from what the layer was given.

``B, T, C = x.shape; q = self.q(x).view(B, T, heads, C // heads)`` is right for all features. Where a rank has a share of q's, C has to be the share's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from axonn_tp.layers.activation import split_of, unwatched

ENDING = ".shape[-1]"
"""Ends the names of counts that are the width of an argument of the forward, as ``x.shape[-1]``."""


class AsShare(Tensor):
    """An input that tells another shape while its module runs; all else is computed with the input itself.

    Attributes:
        axonn_own: the input.
        axonn_told: the shape.
    """

    axonn_own: Tensor
    axonn_told: torch.Size
    axonn_stands_in = True

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The function's result for the inputs themselves."""
        if function == _SHAPE:
            return args[0].axonn_told
        if function is Tensor.size:
            dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim")
            return args[0].axonn_told if dim is None else args[0].axonn_told[dim]
        given, named = tree_map(own, (args, kwargs or {}))
        return function(*given, **named)


_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]


def own(value: Any) -> Any:
    """The input itself; what is none stays as it is."""
    return value.__dict__["axonn_own"] if type(value) is AsShare else value


def take_own(module: nn.Module, inputs: tuple) -> tuple | None:
    """Give a split layer the input itself: a hook, which keeps `nn.TransformerEncoderLayer` off a fast path that reads weights directly, besides."""
    return tuple(map(own, inputs)) if any(type(one) is AsShare for one in inputs) else None


def argument(name: str) -> str:
    """The argument of a count that is a width, empty for another count."""
    return name.removesuffix(ENDING) if name.endswith(ENDING) else ""


def widths_of(module: nn.Module) -> list[str]:
    """Counts that are widths which a module's forward may read: that of its first argument, where the code looks at shapes."""
    forward = type(module).forward
    names, code = list(signature(forward).parameters)[1:2], getattr(forward, "__code__", None)
    if code is not None and not {"shape", "size"} & {*code.co_names}:
        return []
    return [f"{name}{ENDING}" for name in names]


def given_for(module: nn.Module, name: str, args: tuple, kwargs: Mapping[str, Any]) -> tuple[int | None, Any]:
    """The place of an argument among those without a name, None where it has one, and its value."""
    if name in kwargs:
        return None, kwargs[name]
    place = [*signature(type(module).forward).parameters][1:].index(name)
    return place, args[place] if place < len(args) else None


def shaped(
    module: nn.Module,
    names: Iterable[str],
    args: tuple,
    kwargs: dict[str, Any],
    width: int,
    wholes: Mapping[str, int | None] | None = None,
) -> tuple[tuple, dict[str, Any], list[AsShare]]:
    """Arguments of a module's forward, those that `names` names as shares of so many features.

    Args:
        module: the module.
        names: of counts.
        args: its arguments.
        kwargs: those with a name.
        width: a share's features.
        wholes: by argument, how many tokens there are, of which the input may have a share; read of the input itself where it is left out.

    Returns:
        The arguments, and those among them that tell another shape.
    """
    made: list[AsShare] = []
    for name in filter(None, map(argument, names)):
        place, given = given_for(module, name, args, kwargs)
        if not isinstance(given, Tensor) or not given.dim():
            continue
        tokens = _tokens(given) if wholes is None else wholes.get(name)
        told = [*given.shape[:-1], width]
        if tokens is not None and given.dim() > 1:
            told[-2] = tokens
        with unwatched():
            share = given.as_subclass(AsShare)
        share.axonn_own, share.axonn_told = given, torch.Size(told)
        made.append(share)
        if place is None:
            kwargs = {**kwargs, name: share}
        else:
            args = (*args[:place], share, *args[place + 1 :])
    return args, kwargs, made


def end(shares: Iterable[AsShare]) -> None:
    """The module has run: what kept its input reads the input's shape."""
    for share in shares:
        share.axonn_told = share.axonn_own.shape


def _tokens(given: Tensor) -> int | None:
    """Number of all tokens of an activation of which a rank has some."""
    split = split_of(given)
    tokens = None if split is None else split.tokens
    scattered = tokens is not None and tokens.ranks > 1 and tokens.dim == -2 and given.dim() == tokens.dims
    return tokens.whole if scattered else None  # type: ignore[union-attr]
