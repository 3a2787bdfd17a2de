"""Logits of which a rank has some classes, as a head gives them where a plan names a loss: what looks across these is refused."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _named(*names: str) -> set[Any]:
    return {getattr(home, name) for name in names for home in (torch, Tensor, F) if hasattr(home, name)}


_LOSSES = _named("cross_entropy", "nll_loss", "multi_margin_loss", "multinomial")
_ALONG: dict[Any, int] = {
    **dict.fromkeys(_named("softmax", "log_softmax", "softmin", "logsumexp", "argmax", "argmin", "max", "amax"), 1),
    **dict.fromkeys(_named("min", "amin", "sort", "argsort", "cumsum", "gather", "index_select"), 1),
    **dict.fromkeys(_named("topk", "kthvalue", "take_along_dim"), 2),
    **dict.fromkeys(_named("gumbel_softmax"), 4),
}
"""Functions along a dim, and the place of that among their arguments."""


def refuse_across(function: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuse what would be of this rank's classes alone.

    Raises:
        ValueError: the function looks across classes.
    """
    logits = args[0] if args else kwargs.get("input")
    if not isinstance(logits, Tensor) or not (
        function in _LOSSES or (function in _ALONG and _last(function, args, kwargs))
    ):
        return
    name = getattr(function, "__name__", str(function)).strip("_")
    raise ValueError(
        f"{name} looks across the classes of logits of shape {tuple(logits.shape)}, of which a rank has a share, as the plan names a loss; take that loss, "
        "or leave it out of the plan, so that the head gives all classes"
    )


def _last(function: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """True if a function works along its first argument's last dim, or all of them."""
    place = _ALONG[function]
    dims = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else None))
    if isinstance(dims, Tensor):  # of another tensor the larger element
        return False
    dims = dims if isinstance(dims, (tuple, list)) else (dims,)
    return any(dim is None or dim % args[0].dim() == args[0].dim() - 1 for dim in dims) if args else True
