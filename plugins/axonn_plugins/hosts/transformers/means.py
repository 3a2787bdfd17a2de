"""Losses of readers that make one process's, whether a model or a script adds its rows up or takes their mean.

Gradients are the mean of the readers', and the Trainer multiplies a loss by their number where it knows ``num_items_in_batch``, as if it were
always divided by that. Here a sum, divided by the items of all or not, counts as often as there are readers, and a mean, as T5's and most
classifiers', by the reader's share of the items. A loss that is neither, as one over pairs of rows, is the mean of the readers'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.transformers.asking import asked
from axonn_plugins.hosts.transformers.balance import balanced, balances, times
from axonn_plugins.hosts.transformers.kinds import (
    Before,
    Kind,
    Watching,
    agreed,
    counted_items,
    counts_processes,
    refined,
)
from axonn_plugins.hosts.transformers.last_batch import share
from axonn_plugins.hosts.transformers.readers import has_block
from axonn_plugins.hosts.transformers.tokens import of_all_readers, of_all_targets

_weights: dict[int, float] = {}  # of AdaLoRA's configurations in use, as they were given


def in_one_process(
    self: Any,
    original: Callable[..., Any],
    model: Any,
    inputs: Any,
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
    *,
    own: bool = True,
    **more: Any,
) -> Any:
    """A Trainer's `compute_loss`, so that the mean of the readers' losses is one process's.

    Args:
        self: the Trainer.
        original: its method.
        model: given to it, as the others are.
        inputs: the batch.
        return_outputs: whether they are wanted beside the loss.
        num_items_in_batch: of all readers; None where nothing takes it.
        own: it may be a script's. Where that asks how many processes there are it counts them itself.
        **more: given to it.

    Raises:
        ConfigError: the batch is no mapping, where there are several readers.
    """
    readers, more["num_items_in_batch"] = self.accelerator.num_processes, num_items_in_batch
    if readers == 1 or not has_block(self.accelerator):
        return original(model, inputs, return_outputs=return_outputs, **more)
    if not isinstance(inputs, Mapping):
        raise ConfigError(
            f"a batch of the Trainer is of type {type(inputs).__name__}, in which rows and labels have no names by which the losses of {readers} readers "
            "(gz times data ranks) could be made one process's; have the data_collator give a dictionary, or use gx and gy alone, whose ranks are one reader"
        )
    labels, by_engine = _labels(self, model, inputs, num_items_in_batch)

    def loss(some: dict[str, Any]) -> Any:
        return original(model, some, **more)

    # What computes the loss may take the labels out of its inputs.
    rows, again, watching = dict(inputs), copy(inputs), Watching(num_items_in_batch)
    kinds: dict[tuple, Kind] = vars(self).setdefault("_axonn_kinds", {})
    counts: dict[tuple, bool] = vars(self).setdefault("_axonn_counts", {})
    key = (type(self), id(self.compute_loss_func), self.model.training, own)
    self._axonn_weighed = False
    summed = num_items_in_batch is not None and (key not in kinds or kinds[key].adds)
    by_trl = own and type(self).compute_loss.__module__.startswith("trl.")
    constants, losses = _constants_once(self.model, readers if summed else 1), times()
    expected: Any = _part(self) if by_trl else readers if summed else share()
    watch = watching if key not in kinds else of_all_targets(self) if kinds[key].by_targets else nullcontext()
    if key in kinds and not summed and balances(self.model):
        expected, watch = _of_mixture(self, _factor(self, kinds[key], labels, readers), watch)
    called: set[tuple] = vars(self).setdefault("_axonn_called", set())
    first = None if key in called or by_trl else Before(self.model)
    called.add(key)
    with watch, constants, of_all_readers(self), balanced(self, expected):
        before = asked()
        found = original(model, inputs, return_outputs=return_outputs, **more)
        counted = asked() != before
    if self._axonn_weighed:  # the Trainer's own method was in it
        return found
    self._axonn_weighed = True
    if counted and own and not by_trl and not by_engine:
        if key not in counts:
            counts[key] = counts_processes(self, loss, rows)
        counted = counts[key]
    if by_engine or own and counted or by_trl:
        left_out = by_trl and watching.divides != counted
        return _times(found, _part(self) * (_left_out(self, counted, readers) if left_out else 1))
    if key not in kinds:
        kinds[key] = kind = agreed(self, watching, labels, loss, rows)
        if kind.by_targets or times() != losses and not (summed and kind.adds):  # which took it for another kind
            targets = of_all_targets(self) if kind.by_targets else nullcontext()
            if first is not None:
                first.again()
            expected, targets = _of_mixture(self, _factor(self, kind, labels, readers), targets)
            with targets, balanced(self, expected):
                found = original(model, again, return_outputs=return_outputs, **more)
    if not kinds[key].tried and labels is not None:
        kinds[key] = refined(self, kinds[key], labels, loss, rows)
    factor = _factor(self, kinds[key], labels, readers)
    if isinstance(factor, Tensor) and not balances(self.model):
        found = _without_none(found, factor)
    factor, _ = _of_mixture(self, factor, nullcontext())
    return _times(found, factor / readers if counted else factor)


def _part(self: Any) -> float:
    """The factor of a loss that its trainer has made for several readers."""
    return float(share() > 0) if self._axonn_counted else share()


def _left_out(self: Any, counted: bool, readers: int) -> float:
    """The factor that a trainer of TRL's leaves out: GKD's counts no processes, and SFT's does so also where a script's loss is a mean."""
    if not counted:
        return float(readers)
    return share() / readers if callable(self.compute_loss_func) else 1.0


@contextmanager
def _constants_once(model: Any, times: int) -> Iterator[None]:
    """Inside, what AdaLoRA adds to a loss whatever the rows are is so much less: it is to count once where a sum counts for each reader."""
    configs = [one for one in getattr(model, "peft_config", {}).values() if hasattr(one, "orth_reg_weight")]
    before = [(config, config.orth_reg_weight) for config in configs]
    outer = {id(config) for config in configs} - _weights.keys()
    for config, weight in before:  # a script's method may call the Trainer's, which knows better what is summed
        config.orth_reg_weight = _weights.setdefault(id(config), weight) / times
    try:
        yield
    finally:
        for config, weight in before:
            config.orth_reg_weight = weight
        for known in outer:
            del _weights[known]


def _labels(self: Any, model: Any, inputs: Mapping[str, Any], counted: Any) -> tuple[Tensor | None, bool]:
    """The labels of a batch without those that the goldfish loss leaves out, and whether the engine weighs losses by them."""
    mask: Any = getattr(model, "label_mask", None)
    active = mask is not None and mask.active(self.model.training)
    if active:
        inputs = mask.arguments((), dict(inputs), self.model.training)[1]
    labels = inputs.get("labels")
    return labels if isinstance(labels, Tensor) else None, active and counted is None


def _times(found: Any, factor: Any) -> Any:
    """A loss, alone or before outputs, as it counts; where that is nothing it may be of no token, and nan."""
    if isinstance(found, tuple):
        return _times(found[0], factor), *found[1:]
    factor = factor.to(found.dtype) if isinstance(factor, Tensor) else factor
    return found * factor if share() else found.nan_to_num() * 0


def _without_none(found: Any, factor: Tensor) -> Any:
    """A loss, alone or before outputs, which may be nan where the reader has no labels: its factor is 0."""
    if isinstance(found, tuple):
        return _without_none(found[0], factor), *found[1:]
    return torch.where(factor == 0, found.nan_to_num(), found)


class _OfNone(TorchFunctionMode):
    """A mean over no targets is 0."""

    def __init__(self, none: Tensor) -> None:
        super().__init__()
        self._none = none

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = function(*args, **(kwargs or {}))
        mean = getattr(function, "__name__", "") == "cross_entropy"
        return torch.where(self._none, found.nan_to_num(), found) if mean else found


def _of_mixture(self: Any, factor: Any, around: AbstractContextManager) -> tuple[Any, AbstractContextManager]:
    """The factor of a mixture's loss, of which its routers' part counts where a reader has no labels, too, and what is around the call."""
    if not isinstance(factor, Tensor) or not balances(self.model):
        return factor, around
    return torch.where(factor == 0, 1.0, factor), _OfNone(factor == 0)


def _factor(self: Any, kind: Kind, labels: Tensor | None, readers: int) -> Any:
    """The factor of this reader's loss in the mean of all readers'."""
    if kind.adds:
        return readers
    if labels is None or kind.by_rows or kind.by_targets:
        return share()
    items = counted_items(labels, kind.shifts, kind.weights).double().to(self.accelerator.device)
    whole = self.accelerator.gather(items).sum()
    return torch.where(whole == 0, 1.0, readers * items / whole)  # where nobody's count, the mean of no number
