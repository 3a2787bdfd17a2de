"""The place of an activation's tokens on a rank, followed from the layer that made it to the one that reads it.

Of a scattered activation a rank holds ⌈tokens/ranks⌉ rows, the last ranks' padded, so that their number does not tell how many
tokens there are: 7 and 8 are both 2 on 4 ranks. Code between layers may flatten an activation to a matrix; the rows are then
every sequence's, one after the other. What looks across tokens sees only this rank's: that is noted and refused where the
result enters a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves, tree_map

from axonn_tp.layers.dropout import DRAWING

REMEDY = (
    'give the embedding that starts the stream "whole_tokens": true in the plan, or use layout = "replicated", so that every rank of x '
    "has all tokens"
)


@dataclass(frozen=True)
class Tokens:
    """The tokens of an activation (…, tokens, features).

    Attributes:
        whole: how many there are.
        ranks: ranks that share them; 1 where each has them all.
        dims: dims of the activation; one with two dims instead has been flattened.
        dim: the tokens' dim, counted from the end.
        crossed: function that looked across a share's tokens, after which it is none.
    """

    whole: int
    ranks: int
    dims: int
    dim: int = -2
    crossed: str = ""

    @property
    def share(self) -> int:
        """Rows of one sequence on a rank, padding included."""
        return -(-self.whole // self.ranks)

    def unflatten(self, rows: Tensor) -> Tensor:
        """A flattened activation with its sequences apart again.

        Raises:
            ValueError: the rows are not whole sequences' shares, or no longer in their place.
        """
        if rows.dim() == 2 < self.dims and not self.crossed and self.dim == -2 and rows.shape[0] % self.share == 0:
            return rows.unflatten(0, (-1, self.share))
        if self.ranks == 1 or (
            rows.dim() == self.dims and not self.crossed and self.dim == -2 and rows.shape[-2] == self.share
        ):
            return rows
        what = f"{self.crossed} looked across" if self.crossed else "code moved or cut"
        raise ValueError(
            f"an activation of shape {tuple(rows.shape)} is no share of {self.whole} tokens over x any more, as {what} them on each rank by "
            f"itself; {REMEDY}"
        )


def joined(one: Tokens | None, other: Tokens | None) -> Tokens | None:
    """Tokens of the result of a function of two activations.

    Raises:
        ValueError: they are shares of different numbers of tokens.
    """
    if one is None or other is None or one == other:
        return one or other
    if 1 in (one.ranks, other.ranks):
        return None if one.ranks == other.ranks else max(one, other, key=lambda tokens: tokens.ranks)
    if one.whole != other.whole:
        raise ValueError(
            f"an activation of {one.whole} tokens meets one of {other.whole}, and both are shared by {one.ranks} ranks of x; {REMEDY}"
        )
    longer = max(one, other, key=lambda tokens: tokens.dims)
    return replace(longer, dim=min(one.dim, other.dim), crossed=one.crossed or other.crossed)


def followed(
    function: Any, args: tuple, kwargs: dict[str, Any], given: Tensor, made: Tensor, tokens: Tokens | None
) -> Tokens | None:
    """Tokens of a tensor that a function made of an activation.

    Args:
        function: torch's.
        args: its arguments.
        kwargs: its keyword arguments.
        given: the first activation among them.
        made: a tensor that it gave.
        tokens: of the activations that it was given.
    """
    if tokens is not None and tokens.ranks > 1:
        if tokens.crossed or function in _EACH:
            return tokens
        rule = _RULES.get(function)
        if rule is not None:
            return rule(function, args, kwargs, given, tokens)
        return tokens if _each_by_itself(function, args, kwargs, given, made, tokens) else _crossed(function, tokens)
    if function in _RESHAPES and given.dim() > 2:
        return _flattened(given, made)
    return tokens if made.dim() == given.dim() == 2 and made.shape[0] == given.shape[0] else None


_found: dict[tuple, bool] = {}
_Operator = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def _each_by_itself(
    function: Any, args: tuple, kwargs: dict[str, Any], given: Tensor, made: Tensor, tokens: Tokens
) -> bool:
    """True if a function without a rule makes of each token what it would make of it alone: tried once, with another first token."""
    name = getattr(function, "__name__", "")
    size = given.shape[tokens.dim] if given.dim() >= -tokens.dim else 0
    in_place = made is given or (name.endswith("_") and (name.startswith("__i") or not name.endswith("__")))
    repeats = not in_place and function not in DRAWING and "empty" not in name and kwargs.get("out") is None
    repeats &= not isinstance(function, _Operator)  # as collectives are
    if not repeats or size < 2 or not given.is_floating_point():
        return True
    rest = tree_map(lambda one: None if one is given else _described(one), (args, kwargs))
    key = (function, given.dim(), tokens.dim, made.dim(), repr(rest))
    if key not in _found:
        other = given.detach().clone()
        other.select(tokens.dim, 0).mul_(-2).add_(1)
        # What is neither an activation nor trained may be changed by the function, as statistics are.
        again = tree_map(
            lambda one: other if one is given else one.clone() if type(one) is Tensor and one.is_leaf else one,
            (args, kwargs),
        )
        state = torch.get_rng_state()
        with torch.no_grad():
            results = [one for one in tree_leaves(function(*again[0], **again[1])) if isinstance(one, Tensor)]
        torch.set_rng_state(state)
        _found[key] = any(
            _same_but_first(made, one, dim)
            for one in results
            if one.shape == made.shape
            for dim in range(made.dim())
            if made.shape[dim] == size
        )
    return _found[key]


def _same_but_first(one: Tensor, other: Tensor, dim: int) -> bool:
    one, other = (tensor.detach().narrow(dim, 1, tensor.shape[dim] - 1) for tensor in (one, other))
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=1e-3, atol=1e-6, equal_nan=True)


def _described(argument: Any) -> Any:
    """An argument of which only the form decides if a function looks across tokens."""
    if isinstance(argument, float):
        return float  # one that changes from step to step would be tried anew in each
    if not isinstance(argument, Tensor):
        return argument
    return tuple(argument.shape) if type(argument) is Parameter else argument.dim()


def _flattened(given: Tensor, made: Tensor) -> Tokens | None:
    """Tokens of a matrix whose rows were an activation's last dim but one, and those before it."""
    rows = given.shape[0]
    for dim, size in enumerate(given.shape[1:-1] if made.dim() == 2 else (), 1):
        rows *= size
        if rows == made.shape[0]:
            return Tokens(size, 1, dim + 2)
    return None


def _crossed(function: Any, tokens: Tokens) -> Tokens:
    return replace(tokens, crossed=getattr(function, "__name__", str(function)).strip("_"))


def _from_end(dim: int, given: Tensor) -> int:
    return dim - given.dim() if dim >= 0 else dim


def _reshaped(function: Any, args: tuple, kwargs: dict[str, Any], given: Tensor, tokens: Tokens) -> Tokens:
    return tokens if tokens.dim == -2 else _crossed(function, tokens)


def _moved(function: Any, args: tuple, kwargs: dict[str, Any], given: Tensor, tokens: Tokens) -> Tokens:
    """Tokens behind a function that puts dims into another order: an empty tensor whose sizes are all different shows which."""
    sizes = list(range(1, given.dim() + 1))
    made = function(torch.empty(sizes, device="meta"), *args[1:], **kwargs)
    return replace(tokens, dim=made.shape.index(sizes[tokens.dim]) - made.dim())


def _indexed(function: Any, args: tuple, kwargs: dict[str, Any], given: Tensor, tokens: Tokens) -> Tokens:
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    taken = [0 if at is None else at.dim() if isinstance(at, Tensor) and at.dtype == torch.bool else 1 for at in index]
    dim = 0
    for number, at in enumerate(index):
        if at is Ellipsis:
            dim = given.dim() - sum(taken[number + 1 :])
        elif dim <= given.dim() + tokens.dim < dim + taken[number]:
            return tokens if isinstance(at, slice) and at == slice(None) else _crossed(function, tokens)
        else:
            dim += taken[number]
    return tokens


def _along(position: int, default: int = -1) -> Callable[..., Tokens]:
    """The rule of functions that work along the dims which are their argument number `position`."""

    def rule(function: Any, args: tuple, kwargs: dict[str, Any], given: Tensor, tokens: Tokens) -> Tokens:
        named = [kwargs[name] for name in ("dim", "dims", "axis") if kwargs.get(name) is not None]
        dims = named[0] if named else args[position] if len(args) > position else default
        dims = dims if isinstance(dims, (tuple, list)) else (dims,)
        return _crossed(function, tokens) if tokens.dim in [_from_end(dim, given) for dim in dims] else tokens

    return rule


def _contracted(function: Any, args: tuple, kwargs: dict[str, Any], given: Tensor, tokens: Tokens) -> Tokens:
    """Tokens of a product: a share of tokens on its right side is summed over, or spread over other tokens."""
    others = [getattr(other, "axonn_split", None) for other in (*args, *kwargs.values()) if other is not given]
    many = any(split is not None and split.tokens is not None and split.tokens.ranks > 1 for split in others)
    right = function is not torch.einsum and given is not args[0]
    return _crossed(function, tokens) if many or right else tokens


def _both(*names: str) -> list[Any]:
    """The functions of these names, torch's, its tensors' and its modules'."""
    return [getattr(home, name) for name in names for home in (torch, Tensor, F) if hasattr(home, name)]


_RESHAPES = {*_both("reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze", "reshape_as", "view_as")}
_EACH = {
    *_both("add", "sub", "mul", "div", "neg", "pow", "square", "sqrt", "rsqrt", "exp", "log", "abs", "clamp"),
    *_both("relu", "gelu", "silu", "tanh", "sigmoid", "where", "masked_fill", "to", "type_as", "float", "double"),
    *_both("half", "bfloat16", "clone", "detach", "contiguous", "__add__", "__radd__", "__sub__", "__rsub__"),
    *_both("__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__neg__", "__pow__"),
}
"""Frequent functions that make of each token what they make of it alone, which need no trial."""
_TRANSPOSED: tuple[Any, ...] = (Tensor.T, Tensor.mT, Tensor.H, Tensor.mH)
_RULES: dict[Any, Callable[..., Tokens]] = {
    **dict.fromkeys(_RESHAPES, _reshaped),
    **dict.fromkeys(
        (*_both("tril", "triu"), F.multi_head_attention_forward), lambda function, *rest: _crossed(function, rest[-1])
    ),
    **dict.fromkeys(_both("transpose", "swapaxes", "swapdims", "t", "movedim", "moveaxis", "permute"), _moved),
    **dict.fromkeys((transposed.__get__ for transposed in _TRANSPOSED), _moved),
    Tensor.__getitem__: _indexed,
    **dict.fromkeys(
        _both("matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "einsum", "scaled_dot_product_attention"), _contracted
    ),
    **dict.fromkeys(
        _both(
            *(
                "sum",
                "mean",
                "amax",
                "amin",
                "max",
                "min",
                "argmax",
                "argmin",
                "var",
                "std",
                "logsumexp",
                "prod",
                "median",
            ),
            *(
                "cumsum",
                "cumprod",
                "cummax",
                "cummin",
                "logcumsumexp",
                "softmax",
                "log_softmax",
                "softmin",
                "flip",
                "sort",
            ),
            *("argsort", "index_select", "narrow", "select", "gather", "glu", "normalize", "gumbel_softmax"),
        ),
        _along(1),
    ),
    **dict.fromkeys(_both("unbind", "cat", "concat", "concatenate"), _along(1, 0)),
    **dict.fromkeys(_both("chunk", "split", "tensor_split"), _along(2, 0)),
    **dict.fromkeys(_both("topk", "roll", "norm", "repeat_interleave"), _along(2)),
}
