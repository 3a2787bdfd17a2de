"""Means that TRL's trainers take over a reader's tokens, which become those over the tokens of all readers.

Such a mean is of a tensor that a mask has chosen from, a cross-entropy, or a sum that is divided by a number of tokens. A loss that holds
one counts by the reader's rows later (`means.in_one_process`), so here it counts by its tokens for each of its rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.transformers.last_batch import share
from axonn_plugins.hosts.transformers.readers import has_block

_COPIES = {"clamp", "clamp_min", "to", "float", "double", "long"}
_SORTED = ("aot", "aot_unpaired")
_CALL = nn.Module._call_impl.__code__
_active = False


def of_all_readers(self: Any) -> AbstractContextManager:
    """Inside, what a trainer of TRL's divides by a reader's tokens is divided by those of all."""
    theirs = any(base.__module__.startswith("trl.") for base in type(self).__mro__)
    if _active or not theirs or not has_block(self.accelerator) or self.accelerator.num_processes == 1:
        return nullcontext()
    return _OfAll(self.accelerator)


def of_all_targets(self: Any) -> AbstractContextManager:
    """Inside, the mean that a cross-entropy takes over the targets of a reader, in a model as well, is divided by those of all."""
    return nullcontext() if _active else _OfTargets(self.accelerator)


def refuse_orders(self: Any) -> None:
    """Refuse a loss of DPO's that sorts the pairs of a batch.

    Raises:
        ConfigError: it would sort those of each reader.
    """
    asked = getattr(self.args, "loss_type", None)
    kinds = [kind for kind in _SORTED if kind in (asked if isinstance(asked, list) else [asked])]
    if kinds and has_block(self.accelerator) and self.accelerator.num_processes > 1:
        raise ConfigError(
            f'loss_type = "{kinds[0]}" sorts the pairs of a batch, of which each of {self.accelerator.num_processes} readers (gz times data ranks) has a '
            "part, so that the loss would depend on the grid; use gx and gy alone, whose ranks are one reader, or another loss_type"
        )


def refuse_heads(self: Any) -> None:
    """Refuse TRL's DistillationTrainer of split models: it multiplies by the heads' weights where the teacher's forward is over.

    Raises:
        ConfigError: weights would be split.
    """
    theirs = any(base.__module__ == "trl.trainer.distillation_trainer" for base in type(self).__mro__)
    block = (
        self.accelerator.state.deepspeed_plugin.deepspeed_config["axonn"]
        if theirs and has_block(self.accelerator)
        else {}
    )
    given, ted = block.get("tensor_parallel") or {}, block.get("ted") or {}
    sizes = {axis: given.get(axis, 1) for axis in ("gx", "gy", "gz")} | {"ted.tensor": ted.get("tensor", 1)}
    sizes = {name: size for name, size in sizes.items() if size != 1}
    if sizes:
        raise ConfigError(
            f"{' and '.join(f'{axis} = {size}' for axis, size in sizes.items())} with TRL's DistillationTrainer, which multiplies hidden states by the weights "
            "of both models' heads outside of the teacher's forward, where a rank has shards; use GKDTrainer of trl.experimental.gkd, which takes what the "
            "models give, or data parallelism alone"
        )


_Step = tuple[Callable[..., Tensor], tuple, dict[str, Any]]


class _Count(NamedTuple):
    """A number of tokens: as it is given, as it was counted, and what was done in between."""

    given: Tensor
    counted: Tensor
    steps: tuple[_Step, ...]


class _OfAll(TorchFunctionMode):
    _in_models = False

    def __init__(self, accelerator: Any) -> None:
        super().__init__()
        self._accelerator = accelerator
        self._chosen: list[Tensor] = []
        self._counts: list[_Count] = []

    def __enter__(self) -> Any:
        global _active
        _active = True
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        global _active
        _active = False
        super().__exit__(*raised)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        replace = self._replacing.get(name)
        found = None if replace is None else replace(self, func, args, kwargs)
        if found is None:
            found = func(*args, **kwargs)
            self._remember(func, name, args, kwargs, found)
        return found

    def _remember(self, func: Any, name: str, args: tuple, kwargs: dict[str, Any], found: Any) -> None:
        """Keep what a mask has chosen, and numbers of tokens."""
        if name == "__getitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            self._chosen.append(found)
        elif name == "sum" and len(args) == 1 and not kwargs and not args[0].is_floating_point() and args[0].dim() > 1:
            self._counts.append(_Count(found, found, ()))
        elif name in _COPIES:
            if _one_of(args, self._chosen):
                self._chosen.append(found)
            elif (count := self._count(args)) is not None:
                self._counts.append(_Count(found, count.counted, (*count.steps, (func, args[1:], kwargs))))

    def _count(self, args: tuple) -> _Count | None:
        return next((one for one in self._counts if args[0] is one.given), None)

    def _mean(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if len(args) != 1 or kwargs or not _one_of(args, self._chosen) or _in_a_model():
            return None
        return self._divided(args[0].sum(), torch.tensor(args[0].numel(), device=args[0].device))

    def _divide(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        count = self._count(args[1:]) if len(args) == 2 and not kwargs else None
        if count is None or _in_a_model():
            return None
        one = isinstance(args[0], Tensor) and args[0].is_floating_point() and not args[0].dim()
        return self._divided(args[0], count.counted, count.steps) if one else None

    def _cross_entropy(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        given = dict(zip(("input", "target", "weight"), args, strict=False)) | kwargs
        target, weights = given["target"], given.get("weight")
        usual = given.get("reduction", "mean") == "mean" and not target.is_floating_point()
        if not usual or not self._in_models and _in_a_model():
            return None
        kept = target.ne(given.get("ignore_index", -100))
        counted = kept.sum() if weights is None else weights[target[kept]].sum()
        return self._divided(func(*args, **kwargs | {"reduction": "sum"}), counted)

    _replacing: dict[str, Callable[..., Any]] = {
        "mean": _mean,
        "cross_entropy": _cross_entropy,
        "div": _divide,
    }

    def _divided(self, summed: Tensor, count: Tensor, steps: tuple[_Step, ...] = ()) -> Tensor:
        """A reader's part of the mean; all readers call it. A least number is one of all readers' tokens, as some may have none."""
        counts = self._accelerator.gather(count.double() if share() else count.double() * 0)
        whole = counts.as_subclass(Tensor).sum()
        for func, rest, named in steps:
            whole = func(whole, *rest, **named)
        whole = whole.to(summed.dtype)
        rows = share()
        return summed * (len(counts) / rows / whole) if rows else (summed / count).nan_to_num()


class _OfTargets(_OfAll):
    _in_models = True
    _replacing = {"cross_entropy": _OfAll._cross_entropy}


def _one_of(args: tuple, known: list[Tensor]) -> bool:
    """True if the first of `args` is one of the known."""
    return any(args[0] is one for one in known)


def _in_a_model() -> bool:
    """True if a module that has parameters is being called, whose means are its own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL and next(frame.f_locals["self"].parameters(), None) is not None:
            return True
        frame = frame.f_back
    return False
