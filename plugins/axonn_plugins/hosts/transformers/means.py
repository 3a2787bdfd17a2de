"""Losses of readers that make one process's, whether a model or a script adds its rows up or takes their mean.

Gradients are the mean of the readers', and the Trainer multiplies a loss by their number where it knows ``num_items_in_batch``, as if it were
always divided by that. Here a sum, divided by the items of all or not, counts as often as there are readers, and a mean, as T5's and most
classifiers', by the reader's share of the items. A loss that is neither, as one over pairs of rows, is the mean of the readers'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from axonn_plugins.config import ConfigError
from axonn_plugins.goldfish import IGNORED
from axonn_plugins.hosts.transformers.accelerate_patch import asked
from axonn_plugins.hosts.transformers.balance import balanced, balances, times
from axonn_plugins.hosts.transformers.last_batch import share
from axonn_plugins.hosts.transformers.readers import has_block
from axonn_plugins.hosts.transformers.tokens import of_all_readers, of_all_targets
from axonn_tp.plan.evaluating import evaluating

_COPIES = {"to", "clone", "detach", "float", "half", "bfloat16", "double"}
_TIMES = 3  # of a batch that is repeated: a loss over pairs of its rows grows by another factor


@dataclass(frozen=True)
class Kind:
    """The kind of loss on which all ranks agree.

    Attributes:
        adds: twice the rows make it twice as large.
        divides: by ``num_items_in_batch``.
        shifts: the first label of a row is no target.
        weights: by which a class counts in a mean; None where all count alike.
        by_targets: it is made of cross-entropies over targets that no labels tell, as the positions of answers, of which some may not count.
    """

    adds: bool
    divides: bool
    shifts: bool
    weights: Tensor | None = None
    by_targets: bool = False


_weights: dict[int, float] = {}  # of AdaLoRA's configurations in use, as they were given
_kinds: WeakKeyDictionary[nn.Module, dict[tuple, Kind]] = WeakKeyDictionary()


class _Watching(TorchFunctionMode):
    """Notices whether something is divided by the number of items, and what targets and weights of classes a cross-entropy has."""

    def __init__(self, items: Any) -> None:
        super().__init__()
        self._copies, self.divides, self.targets = [items], False, -1
        self.weights: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result, name = func(*args, **kwargs), getattr(func, "__name__", "")
        if name == "cross_entropy":
            named = dict(zip(("input", "target", "weight"), args, strict=False)) | kwargs
            self.targets, self.weights = int(named["target"].ne(IGNORED).sum()), named.get("weight")
        if "div" in name or name in _COPIES:
            given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            if any(one is copy for one in given for copy in self._copies):
                self.divides |= "div" in name
                self._copies.append(result)
        return result


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
    """
    readers, more["num_items_in_batch"] = self.accelerator.num_processes, num_items_in_batch
    if readers == 1 or not has_block(self.accelerator) or not isinstance(inputs, Mapping):
        return original(model, inputs, return_outputs=return_outputs, **more)
    labels, by_engine = _labels(self, model, inputs, num_items_in_batch)
    rows, watching = dict(inputs), _Watching(num_items_in_batch)
    kinds = _kinds.setdefault(self.model, {})
    key = (type(self), id(self.compute_loss_func), self.model.training, own)
    self._axonn_weighed = False
    summed = num_items_in_batch is not None and (key not in kinds or kinds[key].adds)
    by_trl = own and type(self).compute_loss.__module__.startswith("trl.")
    constants, losses = _constants_once(self.model, readers if summed else 1), times()
    expected = _part(self) if by_trl else readers if summed else share()
    if key in kinds and not summed and balances(self.model):
        expected = _factor(self, kinds[key], labels, readers)
    watch = watching if key not in kinds else of_all_targets(self) if kinds[key].by_targets else nullcontext()
    with watch, constants, of_all_readers(self), balanced(self, expected):
        before = asked()
        found = original(model, inputs, return_outputs=return_outputs, **more)
        counted = asked() != before
    if self._axonn_weighed:  # the Trainer's own method was in it
        return found
    self._axonn_weighed = True
    if by_engine or own and counted or by_trl:
        left_out = by_trl and watching.divides != counted
        return _times(found, _part(self) * (_left_out(self, counted, readers) if left_out else 1))
    if key not in kinds:
        kinds[key] = kind = _agreed(self, watching, labels, lambda some: original(model, some, **more), rows)
        if kind.by_targets or times() != losses and not (summed and kind.adds):  # which took it for another kind
            targets = of_all_targets(self) if kind.by_targets else nullcontext()
            with targets, balanced(self, _factor(self, kind, labels, readers)):
                found = original(model, inputs, return_outputs=return_outputs, **more)
    factor = _factor(self, kinds[key], labels, readers)
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


def _factor(self: Any, kind: Kind, labels: Tensor | None, readers: int) -> Any:
    """The factor of this reader's loss in the mean of all readers'."""
    if kind.adds:
        return readers
    if labels is None:
        return share()
    items = _items(labels, kind.shifts, kind.weights).double().to(self.accelerator.device)
    whole = self.accelerator.gather(items).sum()
    return (readers * items / whole).nan_to_num()  # of one that counts nothing, none


def _items(labels: Tensor, shifts: bool, weights: Tensor | None = None) -> Tensor:
    targets = labels[..., 1:] if shifts else labels
    return targets.ne(IGNORED).sum() if weights is None else weights[targets[targets.ne(IGNORED)]].sum()


def _agreed(
    self: Any, watching: _Watching, labels: Tensor | None, loss: Callable[..., Any], rows: dict[str, Any]
) -> Kind:
    """Agree on the kind of loss from the first call on every rank; all ranks call it.

    Raises:
        ConfigError: some ranks have labels.
    """
    seen = [False, False]
    if labels is not None and labels.dim() > 1:
        counts = [int(_items(labels, shifts)) for shifts in (False, True)]
        seen = [count == watching.targets for count in counts] if counts[0] != counts[1] else seen
    weighs = watching.weights is not None and labels is not None and not labels.is_floating_point()
    entropies = watching.targets >= 0 and labels is None
    votes = [watching.divides, labels is not None, labels is None, *seen, weighs, entropies]
    divides, labelled, unlabelled, plain, shifted, weighed, by_targets = count_votes(self, votes)
    if labelled and unlabelled:
        raise ConfigError(
            f"labels are in the batches of {labelled} of {labelled + unlabelled} ranks, and losses of readers are weighed by their labels; give "
            "all readers labels, or none"
        )
    adds = divides > 0
    if not adds:
        grows = _growth(self.model, loss, rows)
        summed, others = count_votes(self, [abs(grows - _TIMES) < 0.1 * _TIMES, abs(grows - 1) < 0.1 * _TIMES])
        adds = summed > others
    shifts = shifted > plain if shifted + plain else self._loss_shifts_labels
    weights = watching.weights if weighed == dist.get_world_size() else None
    of_targets = not adds and by_targets == dist.get_world_size()
    return Kind(adds, divides > 0, shifts, None if weights is None else weights.detach().clone(), of_targets)


def count_votes(self: Any, votes: list[bool]) -> list[int]:
    """Number of ranks that give each vote; all ranks call it."""
    summed = torch.tensor(votes, dtype=torch.long, device=self.accelerator.device)
    dist.all_reduce(summed)
    counts: list[int] = summed.tolist()
    return counts


def _growth(model: nn.Module, loss: Callable[..., Any], rows: dict[str, Any]) -> float:
    """Factor by which the loss of a batch grows where each row is there thrice; nan where it cannot be said."""
    from accelerate.utils.operations import find_batch_size

    number = find_batch_size(rows)

    def repeated(value: Any) -> Any:
        has_rows = isinstance(value, Tensor) and value.dim() > 0 and len(value) == number
        return torch.cat([value] * _TIMES) if has_rows else value

    with _evaluating(model):
        whole = loss({key: repeated(value) for key, value in rows.items()})
        once = loss(dict(rows))
    return float(whole) / float(once) if once else float("nan")


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, nothing is random and nothing is kept."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with evaluating(model), torch.random.fork_rng(devices), torch.no_grad():
        yield
