"""Activations that differ among the ranks of x and y, and know it.

What a split layer gives is an `Activation`: a tensor that carries over which axes it is split and how its tokens lie, to
whatever is made of it, so that the next layer, a dropout or a recomputation need nobody's memory. Activations that are whole on
every rank of x and y are plain tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import get_default_nowrap_functions

from axonn_tp.grid.mesh import AXES, Mesh
from axonn_tp.layers.classes import refuse_across
from axonn_tp.layers.dropout import drawing, forked
from axonn_tp.layers.features import Features, placed
from axonn_tp.layers.features import followed as followed_features
from axonn_tp.layers.tokens import Tokens, followed, joined
from axonn_tp.layers.uses_on_shares import noted_uses, uses_on_shares

unwatched = torch._C.DisableTorchFunctionSubclass
"""Inside, activations are treated as plain tensors, and what is made of them is plain."""


@dataclass(frozen=True)
class ActivationSplit:
    """The axes that split an activation's features and tokens.

    Attributes:
        over: of x and y, the axes of more than one rank among whose ranks it differs.
        coordinates: this rank's place on all axes.
        tokens: how its tokens lie; None where every rank has them all, in their place.
        classes: its features are classes, of which each rank has some.
        features: how its features lie, where that is followed.
    """

    over: tuple[str, ...]
    coordinates: Mapping[str, int]
    tokens: Tokens | None = None
    classes: bool = False
    features: Features | None = None

    @property
    def place(self) -> tuple[int, ...]:
        """Tells apart the ranks that hold another share, or other samples."""
        return tuple(self.coordinates[axis] for axis in AXES if axis in (*self.over, "z", "data"))

    def joined(self, other: ActivationSplit) -> ActivationSplit:
        """Split of a tensor that is made of two activations."""
        over = self.over if set(other.over) <= set(self.over) else tuple(dict.fromkeys((*self.over, *other.over)))
        features = self.features if self.features == other.features else None
        tokens = joined(self.tokens, other.tokens)
        return ActivationSplit(over, self.coordinates, tokens, self.classes or other.classes, features)


class Activation(Tensor):
    """A share of an activation; what functions make of it is one, too.

    Attributes:
        axonn_split: how it is split.
    """

    axonn_split: ActivationSplit

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The function's result, which is split as what it was given."""
        if len(types) > 1 and any(getattr(kind, "axonn_stands_in", False) for kind in types):
            return NotImplemented  # what stands for an activation calls the function with it
        kwargs = kwargs or {}
        if function in _ENGINE:
            return _differentiate(function, args, kwargs)
        given, split = _read(args[:1] if function in _CAST else args, kwargs)
        with unwatched():
            if split is None or function in _APART:
                return function(*args, **kwargs)
            if split.classes:
                refuse_across(function, args, kwargs)
            if function in _COUNTING:
                return ShareCount(function(*args, **kwargs))
            if uses_on_shares:
                args, kwargs = noted_uses(function, args, kwargs, split.over)
            if drawing(function, args, kwargs):
                with forked(split.place, given.device):
                    made = function(*args, **kwargs)
            else:
                made = function(*args, **kwargs)
            for one in made if isinstance(made, (tuple, list)) else (made,):
                if type(one) is Tensor or type(one) is Activation:
                    _follow(function, args, kwargs, given, one, split)
        return made


class ShareNumber(Tensor):
    """One number made of a rank's share of an activation, such as its mean: the gradient of the whole's is another, so it is no loss.

    Attributes:
        axonn_made: what made it, in words.
    """

    axonn_made: str

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The function's result; a differentiable number is one of a share, too.

        Raises:
            ValueError: it is differentiated.
        """
        if Activation in types:
            return Activation.__torch_function__(function, types, args, kwargs)
        found = [arg for arg in _flat((*args, *(kwargs or {}).values())) if type(arg) is cls]
        if function in _ENGINE:
            raise ValueError(
                f"the loss was made by {found[0].axonn_made}, and the ranks that hold the other shares would differentiate another one; "
                "compute the loss of what the last layer gives whole (a head, or a self_contained one), or name a head and its loss in the plan"
            )
        with unwatched():
            made = function(*args, **(kwargs or {}))
            if type(made) is Tensor:
                _note_number(made, found[0].axonn_made if found else "a share of an activation")
        return made


class ShareCount(int):
    """Number of elements of a rank's share of an activation."""


class ShareSum(Tensor):
    """A sum over a rank's share of an activation, which is fine as a loss: shares' add up. A mean over a share's elements, or a root of it, is none."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The function's result; where it is linear a sum, or a tensor like others, else no loss."""
        kwargs = kwargs or {}
        if Activation in types or ShareNumber in types:
            other = Activation if Activation in types else ShareNumber
            return other.__torch_function__(function, types, args, kwargs)
        if function in _ENGINE:
            return _differentiate(function, args, kwargs)
        with unwatched():
            made = function(*args, **kwargs)
            if type(made) in (Tensor, cls) and not made.dim():
                _follow_sum(function, args, kwargs, made)
        return made


def _follow_sum(function: Any, args: tuple, kwargs: dict[str, Any], made: Tensor) -> None:
    """Note what a function made of sums over a rank's shares: such a sum itself, where it is one, or a number whose gradient is another."""
    if not made.requires_grad:
        return
    given = [arg for arg in _flat((*args, *kwargs.values())) if isinstance(arg, Tensor)]
    sums = sum(type(arg) is ShareSum for arg in given)
    scales = function in _TIMES or (function in _SCALING and type(args[0]) is ShareSum)
    if function in _SCALING and any(type(arg) is ShareCount for arg in args):
        _note_number(made, "a sum of a rank's share of an activation, divided by the number of the share's elements")
    elif function not in _JOINING and not (scales and sums == 1):
        name = getattr(function, "__name__", str(function)).strip("_")
        _note_number(made, f"{name} of a sum of a rank's share of an activation")
    elif sums == len(given):
        made.__class__ = ShareSum


def _flat(args: Any) -> list[Any]:
    return [one for arg in args for one in (_flat(arg) if isinstance(arg, (tuple, list)) else (arg,))]


def _note_number(made: Tensor, what: str) -> None:
    if not made.dim() and made.requires_grad:
        made.__class__ = ShareNumber
        made.axonn_made = what  # type: ignore[attr-defined]


_ADDING = {torch.sum, Tensor.sum, torch.nansum, Tensor.nansum, torch.dot, Tensor.dot, torch.inner, Tensor.inner}
"""Functions whose results for the shares add up to that for the whole: each rank's gradient is its share's of the sum."""
_COUNTING = {torch.numel, Tensor.numel, Tensor.nelement}


def _named(*names: str) -> set[Any]:
    """The functions of these names, torch's and its tensors'."""
    return {getattr(home, name) for name in names for home in (torch, Tensor) if hasattr(home, name)}


_TIMES = _named("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__")
_SCALING = _TIMES | _named(
    "div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__", "neg", "neg_", "__neg__"
)
_JOINING = {
    *_named("add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "rsub", "__sub__", "__rsub__", "__isub__"),
    *_named("where", "masked_fill", "copy_", "sum", "nansum", "mean", "squeeze", "view", "view_as", "reshape", "clone"),
    *_named("to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda", "contiguous", "nan_to_num"),
    *_named("requires_grad_", "positive", "__pos__"),
}
"""Functions of numbers that are linear in each."""
_CAST = {Tensor.to, Tensor.type_as, Tensor.type}
"""Functions that may give back what they were given; of a second activation they read the type alone."""
_NEW = {Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor, Tensor.new}
_APART = get_default_nowrap_functions()
_ENGINE = {Tensor.backward, torch.autograd.backward, torch.autograd.grad}
"""Functions that run backward passes, and with them recomputations, in which activations are to be followed."""


def _read(args: tuple, kwargs: dict[str, Any]) -> tuple[Any, ActivationSplit | None]:
    """The first activation among arguments, and how all of them together are split."""
    given: Any = None
    split: ActivationSplit | None = None
    for arg in (*args, *kwargs.values()) if kwargs else args:
        for one in arg if type(arg) in (tuple, list) else (arg,):
            if type(one) is Activation:
                found = one.axonn_split
                if split is None:
                    given, split = one, found
                elif found is not split:
                    split = split.joined(found)
    return given, split


def _follow(
    function: Any, args: tuple, kwargs: dict[str, Any], given: Tensor, made: Tensor, split: ActivationSplit
) -> None:
    if not made.dim() and function in _ADDING:
        if made.requires_grad:
            made.__class__ = ShareSum
        return
    if not made.dim():
        name = getattr(function, "__name__", str(function)).strip("_")
        _note_number(made, f"{name} of a rank's share of an activation that is split over {' and '.join(split.over)}")
        return
    if function in _NEW and made.shape != given.shape:
        return
    tokens, features = followed(function, args, kwargs, given, made, split.tokens), split.features
    if features is not None:
        features = followed_features(function, args, kwargs, made, features, _is_share)
    as_before = tokens is split.tokens and features is split.features
    made.__class__ = Activation
    made.axonn_split = split if as_before else replace(split, tokens=tokens, features=features)  # type: ignore[attr-defined]


def _is_share(one: Any) -> bool:
    return type(one) is Activation


def _differentiate(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run the engine on plain outputs; inputs, which an alias would cut off, are given as edges of the graph."""
    named = dict(zip(("outputs", "inputs"), args, strict=False)) if function is torch.autograd.grad else {}
    rest = args[len(named) :]
    # The backward of a checkpoint, which has gradients off, comes here as well.
    with torch.enable_grad():
        made = {
            name: _each(get_gradient_edge if name == "inputs" else plain, arg)
            for name, arg in {**named, **kwargs}.items()
        }
        rest = tuple(_each(plain, arg) for arg in rest)
    return function(*rest, **made)


def _each(change: Any, arg: Any) -> Any:
    if isinstance(arg, (tuple, list)):
        return tuple(_each(change, one) for one in arg)
    return change(arg) if type(arg) in (Activation, ShareSum) else arg


def split_of(tensor: Tensor) -> ActivationSplit | None:
    """The split of a tensor over x and y; None for a plain one."""
    return tensor.__dict__["axonn_split"] if type(tensor) is Activation else None


def plain(tensor: Tensor) -> Tensor:
    """The same values without knowledge of how they are split; differentiable."""
    if type(tensor) not in (Activation, ShareSum):
        return tensor
    with unwatched():
        return tensor.as_subclass(Tensor)


def split_among(
    tensor: Tensor,
    mesh: Mesh,
    over: tuple[str, ...],
    tokens: Tokens | None = None,
    classes: bool = False,
    features: Features | None = None,
) -> Tensor:
    """Note on a tensor that was just made how it is split.

    Args:
        tensor: a plain tensor; becomes an `Activation` if it differs among ranks of x and y.
        mesh: the mesh.
        over: axes among whose ranks it may differ.
        tokens: how its tokens lie.
        classes: see `ActivationSplit`.
        features: how its features lie.
    """
    axes = tuple(axis for axis in over if mesh.size(axis) > 1)
    split = ActivationSplit(axes, mesh.coordinates, tokens, classes, placed(features)) if axes else None
    return tensor if split is None else _noted(tensor, split)


def split_as(tensor: Tensor, other: Tensor) -> Tensor:
    """Note on a tensor that was just made that it is split as another."""
    split = split_of(other)
    return tensor if split is None else _noted(tensor, split)


def _noted(tensor: Tensor, split: ActivationSplit) -> Tensor:
    tensor.__class__ = Activation
    tensor.axonn_split = split  # type: ignore[attr-defined]
    return tensor
