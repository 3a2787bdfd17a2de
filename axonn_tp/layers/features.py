"""The place of an activation's split features, followed from the layer that made it to the end of a part of a model that a script calls by itself.

While a whole model runs nobody asks: its plan says that what it gives is whole. A part may end between the layers of a pair, or in a split stream, and is
to give what it gives in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from axonn_tp.comm.collectives import gather_from, split_to
from axonn_tp.grid.mesh import Mesh


@dataclass(frozen=True)
class Features:
    """The split features of an activation.

    Attributes:
        dim: theirs, counted from the end.
        axes: over which they are split, each within the share of the one before.
        whole: how many there are; the last ranks' padding is behind them.
        parts: this many equal pieces, each split by itself.
    """

    dim: int
    axes: tuple[str, ...]
    whole: int
    parts: int = 1

    def gather(self, share: Tensor, mesh: Mesh) -> Tensor:
        """All of them, for a use that is the same on all ranks."""
        for axis in reversed(self.axes):
            pieces = [
                gather_from(piece.contiguous(), mesh, axis, self.dim) for piece in share.chunk(self.parts, self.dim)
            ]
            share = torch.cat(pieces, self.dim)
        return share.narrow(self.dim, 0, self.whole)

    def split(self, whole: Tensor, mesh: Mesh, width: int) -> Tensor:
        """This rank's share, of so many features."""
        ranks = 1
        for axis in self.axes:
            ranks *= mesh.size(axis)
        missing = width * ranks - self.whole
        if missing:
            filling = [0, 0] * (-self.dim - 1) + [0, missing]
            whole = F.pad(whole, filling, value=float("-inf"))  # of a vocabulary, as a head fills it up
        for axis in self.axes:
            pieces = [split_to(piece, mesh, axis, self.dim) for piece in whole.chunk(self.parts, self.dim)]
            whole = torch.cat(pieces, self.dim)
        return whole


_following: list[None] = []


@contextmanager
def following() -> Iterator[None]:
    """Inside, activations know where their features lie."""
    _following.append(None)
    try:
        yield
    finally:
        _following.pop()


def placed(features: Features | None) -> Features | None:
    """The place of features as an activation that was just made notes it; None where nobody follows it."""
    return features if _following else None


def followed(
    function: Any, args: tuple, kwargs: dict[str, Any], made: Tensor, features: Features, shares: Callable[[Any], bool]
) -> Features | None:
    """Features of a tensor that a function made of an activation; None where they are not known to be in their order.

    Args:
        function: torch's.
        args: its arguments.
        kwargs: its keyword arguments.
        made: a tensor that it gave.
        features: of the activations that it was given.
        shares: tells an activation.
    """
    if not _following:
        return None
    first = next(one for one in tree_leaves((args, kwargs)) if shares(one))
    width = first.shape[features.dim]
    if function in _ELEMENTWISE:
        kept = made.dim() >= -features.dim and made.shape[features.dim] == width
        return features if kept else None
    return _moved(function, args, kwargs, made, features, width, shares) if function in _MOVING else None


def _moved(
    function: Any,
    args: tuple,
    kwargs: dict[str, Any],
    made: Tensor,
    features: Features,
    width: int,
    shares: Callable[[Any], bool],
) -> Features | None:
    """Try a function on whole activations in which each number is that of its feature: what is right for a share alone, as a size, is refused."""

    def numbered(one: Any) -> Any:
        if not shares(one):
            return one
        sizes = list(one.shape)
        sizes[features.dim] = features.whole
        numbers = torch.arange(features.whole, dtype=torch.float64, device=one.device)
        return numbers.view(-1, *[1] * (-features.dim - 1)).expand(sizes).contiguous()

    try:
        with torch.no_grad():
            given, named = tree_map(numbered, (args, kwargs))
            tried = [one for one in tree_leaves(function(*given, **named)) if isinstance(one, Tensor)]
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    dims = {_dim_of(one, made, features.whole, width) for one in tried if one.is_floating_point()}
    dim = dims.pop() if len(dims) == 1 and made.is_floating_point() else 0
    return replace(features, dim=dim) if dim else None


def _dim_of(numbers: Tensor, made: Tensor, whole: int, width: int) -> int:
    """The dim, from the end, along which numbers count from 0, and a share has its width; 0 where there is none, or other dims differ."""
    for dim in range(-1, -numbers.dim() - 1, -1):
        if numbers.shape[dim] == whole:
            sizes = list(numbers.shape)
            sizes[dim] = width
            expected = torch.arange(whole, dtype=numbers.dtype, device=numbers.device)
            if torch.equal(numbers, expected.view(-1, *[1] * (-dim - 1)).expand(numbers.shape)):
                return dim if sizes == list(made.shape) else 0
    return 0


def _named(*names: str) -> set[Any]:
    homes = (torch, Tensor, F)
    return {getattr(home, name) for name in names for home in homes if callable(getattr(home, name, None))}


_ACTIVATIONS = (
    *("relu", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "hardtanh", "hardswish", "sigmoid"),
    *(
        "hardsigmoid",
        "logsigmoid",
        "softplus",
        "softsign",
        "tanhshrink",
        "tanh",
        "threshold",
        "dropout",
        "alpha_dropout",
    ),
)
_ARITHMETIC = (
    *("add", "sub", "rsub", "mul", "multiply", "div", "divide", "true_divide", "neg", "pow", "square", "sqrt", "rsqrt"),
    *(
        "exp",
        "expm1",
        "log",
        "log1p",
        "abs",
        "clamp",
        "clip",
        "clamp_min",
        "clamp_max",
        "erf",
        "sin",
        "cos",
        "reciprocal",
    ),
    *("maximum", "minimum", "lerp", "addcmul", "addcdiv", "where", "masked_fill", "nan_to_num", "positive", "clone"),
    *("to", "type", "type_as", "float", "double", "half", "bfloat16", "detach", "contiguous", "cpu", "cuda"),
)
_OPERATORS = (
    "add",
    "radd",
    "iadd",
    "sub",
    "rsub",
    "isub",
    "mul",
    "rmul",
    "imul",
    "truediv",
    "rtruediv",
    "itruediv",
    "neg",
    "pow",
)
_ELEMENTWISE = {
    *_named(*_ACTIVATIONS, *_ARITHMETIC),
    *_named(*(f"{name}_" for name in (*_ACTIVATIONS, *_ARITHMETIC))),
    *_named(*(f"__{name}__" for name in _OPERATORS)),
}
"""Functions that make of each number what they make of it alone."""
_MOVING = {
    *_named(
        "view",
        "view_as",
        "reshape",
        "reshape_as",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "transpose",
        "permute",
    ),
    *_named(
        "movedim",
        "moveaxis",
        "swapaxes",
        "swapdims",
        "t",
        "expand",
        "expand_as",
        "repeat",
        "select",
        "narrow",
        "index_select",
    ),
    *_named(
        "mean",
        "amax",
        "amin",
        "max",
        "min",
        "cat",
        "concat",
        "stack",
        "chunk",
        "split",
        "unbind",
        "__getitem__",
        "flip",
    ),
    *_named(
        "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "avg_pool2d", "max_pool2d", "interpolate"
    ),
    *(moved.__get__ for moved in (Tensor.T, Tensor.mT)),  # type: ignore[attr-defined]
}
"""Functions that move features, or join what is not features, as numbers of features that come out in their order tell."""
