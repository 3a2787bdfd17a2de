"""Functions of torch's that look across tokens, on shares of them: attention, losses and places.

Whatever else looks across tokens is found by `axonn_tp.context.verify`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from axonn_tp.comm.collectives import all_reduce
from axonn_tp.context.attention import attend, drawn_seed
from axonn_tp.context.calls import Call
from axonn_tp.context.chunks import Sight
from axonn_tp.context.shared import AXIS
from axonn_tp.context.sums import current, over_sequence, real_targets
from axonn_tp.layers.activation import plain, split_as


class Replaced(TorchFunctionMode):
    """Replaces torch's functions that look across tokens."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        replaced = _REPLACED.get(function)
        if replaced is None or current() is not self.call:
            return function(*args, **(kwargs or {}))
        return replaced(self.call, *args, **(kwargs or {}))


def _attention(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    shares = query.shape[-2] == key.shape[-2] == call.share
    call.attended[shares] += 1
    if not shares:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None:
        raise ValueError(
            f"scaled_dot_product_attention is given a mask of shape {tuple(attn_mask.shape)} made of a share of the tokens; where ranks share "
            "sequences use is_causal=True, or no mask"
        )
    q, k, v = (plain(t) if t.dim() == 4 else plain(t).unsqueeze(-3) for t in (query, key, value))
    documents = call.seen(is_causal)
    seed = drawn_seed(query) if dropout_p else None
    made = attend(q, k, v, call.shared, Sight(is_causal), documents, scale, dropout=dropout_p, seed=seed)
    return split_as(made.view(*query.shape[:-1], value.shape[-1]), query)


def _loss(
    call: Call,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    settings: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if target.is_floating_point():
        return F.cross_entropy(input, target, reduction=reduction, **settings)
    given, target = target, real_targets(target, ignore_index)
    if reduction == "none":
        return F.cross_entropy(input, given, reduction=reduction, **settings)
    rows = F.cross_entropy(input, target, reduction="none", **settings)
    total = rows.sum(dtype=torch.promote_types(rows.dtype, torch.float32))
    if reduction == "sum":
        return over_sequence(total).to(rows.dtype)
    counted = target != ignore_index
    count = counted.sum().to(total) if weight is None else weight.to(total)[target[counted]].sum()
    total, count = over_sequence(torch.stack([total, count])).unbind()
    return (total / count).to(rows.dtype)


def _places(call: Call, *args: Any, **kwargs: Any) -> Tensor:
    numbers = [kwargs.get("start", 0), kwargs["end"]] if "end" in kwargs else list(args)
    numbers = [0, *numbers] if len(numbers) == 1 else numbers
    dtype, out = kwargs.get("dtype"), kwargs.get("out")
    if numbers != [0, call.share] or (dtype or torch.int64).is_floating_point or out is not None:
        return torch.arange(*args, **kwargs)
    call.counted += 1
    return call.places.to(kwargs.get("device") or call.places.device, dtype or torch.int64)


def _largest(call: Call, *args: Any, **kwargs: Any) -> Tensor:
    """The largest of whole numbers, one for each token, as of their places: by it HF's rotary positions tell how long sequences are."""
    found = torch.max(*args, **kwargs)
    given = args[0] if len(args) == 1 and not kwargs else None
    if given is None or given.dtype not in (torch.int32, torch.int64) or given.dim() < 2:
        return found
    return all_reduce(found, call.mesh, AXIS, "max") if given.shape[-1] == call.share else found


_REPLACED: dict[Any, Callable[..., Tensor]] = {
    F.scaled_dot_product_attention: _attention,
    F.cross_entropy: _loss,
    torch.arange: _places,
    torch.max: _largest,
    Tensor.max: _largest,
}
