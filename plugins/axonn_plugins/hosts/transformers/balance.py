"""Load-balancing losses of mixtures of experts over the tokens of all readers: no mean of such losses is that of all tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.transformers.accelerate_patch import same
from axonn_plugins.hosts.transformers.last_batch import share
from axonn_plugins.hosts.transformers.readers import has_block

_NAME, _LOGITS = "load_balancing_loss_func", "gate_logits"
_ROWS = {"router_probs": _NAME, "router_logits": "router_z_loss_func"}
"""Switch's functions by their first argument: means over rows, and over each row's tokens, those of padding as well."""
_have: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
_factor: float | Tensor | None = None
_times = 0


@contextmanager
def balanced(self: Any, factor: float | Tensor) -> Iterator[None]:
    """Inside, such a loss is that of all readers' tokens, and counts once, though what it is added to counts `factor` times in a mean over readers."""
    global _factor
    before = _factor
    if has_block(self.accelerator):
        _factor = factor if self.accelerator.num_processes > 1 and balances(self.model) else None
    try:
        yield
    finally:
        _factor = before


def times() -> int:
    """Number of such losses that have been computed."""
    return _times


def balances(model: nn.Module) -> bool:
    """True if a model may add such a loss to its own, which is then that of all readers inside `balanced`."""
    if model not in _have:
        files = {type(module).__module__ for module in model.modules()}
        found = [sys.modules[file] for file in files if hasattr(sys.modules[file], _NAME)]
        if found:
            from transformers.models.mixtral import modeling_mixtral  # whose TRL takes for all families

            found.append(modeling_mixtral)
        for module in found:
            for name in (_NAME, *_ROWS.values()):
                original = getattr(module, name, None)
                if original is not None and not getattr(original, "axonn", False):
                    _replace(module, name, original)
        _have[model] = bool(found)
    return _have[model]


def _replace(module: Any, name: str, original: Callable[..., Any]) -> None:
    first = next(iter(signature(original).parameters))
    if first == _LOGITS:
        setattr(module, name, _of_all(original))
    elif _ROWS.get(first) == name:
        setattr(module, name, _of_rows(original))


def _of_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def of_rows(rows: Tensor, *rest: Any) -> Any:
        """A mixture's own loss, of which each reader's counts by its rows.

        Raises:
            ConfigError: readers have padded to different lengths; the same on all ranks.
        """
        own = original(rows, *rest)
        if _factor is None:
            return own
        global _times
        _times += 1
        tokens = rows.size(1)
        found = torch.tensor([tokens, -tokens] if share() else [-(2**31)] * 2, device=rows.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        if found[0] != -found[1]:
            raise ConfigError(
                f"{original.__name__} of {original.__module__.rpartition('.')[2]} is a mean over tokens of padding, too, and readers pad their rows to "
                'different lengths, so that the loss would depend on the grid; pad all batches to one length (padding = "max_length"), or set '
                "output_router_logits = False in the model's configuration"
            )
        return (own * share() / _factor).to(own.dtype) if share() else own * 0  # of one type on all ranks

    of_rows.axonn = True  # type: ignore[attr-defined]
    return of_rows


def _of_all(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load_balancing_loss_func(*given: Any, **named: Any) -> Any:
        bound = signature(original).bind(*given, **named)
        logits, mask = bound.arguments[_LOGITS], bound.arguments.get("attention_mask")
        if _factor is None or not isinstance(logits, tuple) or not logits:
            return original(*given, **named)
        global _times
        _times += 1
        columns = [layer.flatten(0, -2) for layer in logits]
        columns += [] if mask is None else [mask.reshape(-1, 1).to(columns[0])]
        every = _rows_of_all(torch.cat(columns, -1)).split([column.size(-1) for column in columns], -1)
        bound.arguments[_LOGITS] = every[: len(logits)]
        if mask is not None:
            bound.arguments["attention_mask"] = every[-1].view(1, -1)
        whole = original(*bound.args, **bound.kwargs)
        return _counting_once(whole, dist.get_world_size() // same())

    load_balancing_loss_func.axonn = True  # type: ignore[attr-defined]
    return load_balancing_loss_func


def _counting_once(whole: Tensor, readers: int) -> Tensor:
    """A loss of which each reader has the gradient of its own tokens: its value is to be the mean of all, its gradient their sum."""
    assert _factor is not None
    value = whole.detach()
    if not share():
        return whole * 0
    counted: Tensor = (value * share() / _factor + (whole - value) * readers / _factor).to(whole.dtype)
    counted.axonn_whole = value  # type: ignore[attr-defined]
    return counted


def _rows_of_all(rows: Tensor) -> Tensor:
    """Rows of all readers, this one's in their graph; all readers call it."""
    own = rows if share() else rows[:0]
    lengths = [torch.zeros(1, dtype=torch.long, device=rows.device) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(own)], device=rows.device))
    longest = max(int(length) for length in lengths)
    padded = own.detach().new_zeros(longest, rows.size(-1))
    padded[: len(own)] = own.detach()
    found = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(found, padded)
    parts = [one[: int(length)] for one, length in zip(found, lengths, strict=True)][:: same()]
    parts[dist.get_rank() // same()] = own
    return torch.cat(parts)
