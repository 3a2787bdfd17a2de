"""Kinds of losses: found from a script's first call of one and from calls of changed batches, and agreed on by all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from axonn_plugins.config import ConfigError
from axonn_plugins.goldfish import IGNORED
from axonn_plugins.hosts.transformers.asking import counting_times
from axonn_tp.plan.evaluating import evaluating

_COPIES = {"to", "clone", "detach", "float", "half", "bfloat16", "double"}
_TIMES = 3  # of a batch that is repeated: a loss over pairs of its rows grows by another factor
_KEPT = 2  # labels of a row in a batch that is as much as whole rows in a mean over rows, and less in one over labels


@dataclass(frozen=True)
class Kind:
    """The kind of loss on which all ranks agree.

    Attributes:
        adds: twice the rows make it twice as large.
        divides: by ``num_items_in_batch``.
        shifts: the first label of a row is no target.
        weights: by which a class counts in a mean; None where all count alike.
        by_targets: it is made of cross-entropies each of which is a mean over targets of its own.
        by_rows: a row counts as much as any other, however many labels it has.
        tried: whether rows or labels count is known; not until some label is left out.
    """

    adds: bool
    divides: bool
    shifts: bool
    weights: Tensor | None = None
    by_targets: bool = False
    by_rows: bool = False
    tried: bool = True


class Watching(TorchFunctionMode):
    """Notices whether something is divided by the number of items, and what cross-entropies are taken over.

    Attributes:
        divides: something was.
        targets: of the last cross-entropy; -1 where there was none.
        weights: of its classes.
        means: number of cross-entropies that are means.
        ignores: one of these leaves out other targets than labels of -100.
    """

    def __init__(self, items: Any = None) -> None:
        super().__init__()
        self._copies, self.divides, self.targets = [items], False, -1
        self.weights: Tensor | None = None
        self.means, self.ignores = 0, False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result, name = func(*args, **kwargs), getattr(func, "__name__", "")
        if name == "cross_entropy":
            named = dict(zip(("input", "target", "weight"), args, strict=False)) | kwargs
            self.targets, self.weights = int(named["target"].ne(IGNORED).sum()), named.get("weight")
            self.means += named.get("reduction", "mean") == "mean"
            self.ignores |= named.get("ignore_index", IGNORED) != IGNORED
        if "div" in name or name in _COPIES:
            given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            if any(one is copy for one in given for copy in self._copies):
                self.divides |= "div" in name
                self._copies.append(result)
        return result


def counted_items(labels: Tensor, shifts: bool, weights: Tensor | None = None) -> Tensor:
    """Number of labels that count, or the sum of their classes' weights."""
    targets = labels[..., 1:] if shifts else labels
    return targets.ne(IGNORED).sum() if weights is None else weights[targets[targets.ne(IGNORED)]].sum()


def agreed(
    self: Any, watching: Watching, labels: Tensor | None, loss: Callable[..., Any], rows: dict[str, Any]
) -> Kind:
    """Agree on the kind of loss from the first call on every rank; all ranks call it.

    Raises:
        ConfigError: some ranks have labels.
    """
    seen = [False, False]
    if labels is not None and labels.dim() > 1:
        counts = [int(counted_items(labels, shifts)) for shifts in (False, True)]
        seen = [count == watching.targets for count in counts] if counts[0] != counts[1] else seen
    weighs = watching.weights is not None and labels is not None and not labels.is_floating_point()
    votes = [watching.divides, labels is not None, labels is None, *seen, weighs]
    divides, labelled, unlabelled, plain, shifted, weighed = count_votes(self, votes)
    if labelled and unlabelled:
        raise ConfigError(
            f"labels are in the batches of {labelled} of {labelled + unlabelled} ranks, and losses of readers are weighed by their labels; give "
            "all readers labels, or none"
        )
    shifts = shifted > plain if shifted + plain else self._loss_shifts_labels
    weights = watching.weights if weighed == dist.get_world_size() else None
    kind = Kind(divides > 0, divides > 0, shifts, None if weights is None else weights.detach().clone())
    return kind if kind.adds else _of_calls(self, kind, watching, labels, loss, rows)


def _of_calls(
    self: Any, kind: Kind, watching: Watching, labels: Tensor | None, loss: Callable[..., Any], rows: dict[str, Any]
) -> Kind:
    """The kind of a loss that is divided by no number of items; all ranks call it."""
    with Watching() as again, _evaluating(self.model):
        whole = float(loss(_joined(rows, [rows] * _TIMES)))
    with _evaluating(self.model):
        once = float(loss(dict(rows)))
    grows = whole / once if once else float("nan")
    apart = watching.means == 0 or watching.means == 1 and labels is not None and not watching.ignores
    apart |= again.means != watching.means  # one for each row, of which readers have not as many
    by_numbers = [watching.means, watching.means**2]
    found = count_votes(self, [_near(grows, _TIMES), _near(grows, 1), apart, grows == grows, *by_numbers])
    summed, others, apart_on, known, means, squares = found
    ranks = dist.get_world_size()
    if summed > others:
        return Kind(True, False, kind.shifts, kind.weights)
    if not apart_on and means**2 == squares * ranks:
        return Kind(False, False, kind.shifts, kind.weights, by_targets=True)
    if known == ranks and not summed + others:
        _say(self)
        return kind
    return replace(kind, tried=labels is None or labels.dim() < 2 or labels.is_floating_point())


def refined(self: Any, kind: Kind, labels: Tensor, loss: Callable[..., Any], rows: dict[str, Any]) -> Kind:
    """The kind of a mean, once there is a label that does not count; all ranks call it."""
    if not count_votes(self, [(labels == IGNORED).any()])[0]:
        return kind
    fits = _fits(self.model, kind, labels, loss, rows)
    by_rows, by_labels, none = count_votes(self, [*fits, not any(fits)])
    if none == dist.get_world_size():
        _say(self)
    return replace(kind, tried=True, by_rows=by_rows > by_labels)


def _near(grows: float, times: int) -> bool:
    return abs(grows - times) < 0.1 * times


def _fits(
    model: nn.Module, kind: Kind, labels: Tensor, loss: Callable[..., Any], rows: dict[str, Any]
) -> tuple[bool, bool]:
    """True if a loss is a mean over rows, and if it is one over labels, by the batch beside itself with few labels in each row."""
    places = labels.ne(IGNORED).flatten(1).cumsum(1).view_as(labels)
    few = labels.where(places <= _KEPT, IGNORED)
    short = {key: few if value is labels else value for key, value in rows.items()}
    with _evaluating(model):
        whole, part, both = (float(loss(one)) for one in (dict(rows), dict(short), _joined(rows, [rows, short])))
    counts = [float(counted_items(each, kind.shifts, kind.weights)) for each in (labels, few)]
    by_labels = (counts[0] * whole + counts[1] * part) / sum(counts) if sum(counts) else float("nan")
    off = [abs(expected - both) for expected in ((whole + part) / 2, by_labels)]
    allowed = 1e-5 * abs(both) + 0.05 * max(off)
    return off[0] <= allowed, off[1] <= allowed


def _joined(rows: dict[str, Any], parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Batches as large as `rows`, one behind the other."""
    from accelerate.utils.operations import find_batch_size

    number = find_batch_size(rows)

    def joined(key: str, value: Any) -> Any:
        if isinstance(value, list) and len(value) == number:  # as of boxes
            return [one for part in parts for one in part[key]]
        if not isinstance(value, Tensor) or not value.dim():
            return value
        at = 1 if value.dim() > 1 and len(value) != number == value.size(1) else 0  # as positions of several kinds
        return value if len(value) != number and value.dim() == 1 else torch.cat([part[key] for part in parts], at)

    return {key: joined(key, value) for key, value in rows.items()}


_told: set[str] = set()


def _say(self: Any) -> None:
    """Say that a loss is of no kind that could be made one process's, once for a class of trainers."""
    name = type(self).__name__
    if name in _told:
        return
    _told.add(name)
    if dist.get_rank() == 0:
        print(
            f"axonn: the loss of {name} is neither a sum nor a mean over the rows or the labels of a batch, as one over pairs of rows, or a constant beside a "
            f"sum; it is the mean of those of {self.accelerator.num_processes} readers (gz times data ranks), and depends on their number; gx and gy alone, "
            "whose ranks are one reader, train as one process does",
            file=sys.stderr,
            flush=True,
        )


class Before:
    """A model's buffers, as BatchNorm's statistics, and the generators, before a call in training that another may have to replace."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
        self._random = torch.get_rng_state()
        self._of_device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def again(self) -> None:
        """Undo what the call has changed."""
        with torch.no_grad():
            for buffer, value in self._buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        torch.set_rng_state(self._random)
        if self._of_device is not None:
            torch.cuda.set_rng_state(self._of_device)


def counts_processes(self: Any, loss: Callable[..., Any], rows: dict[str, Any]) -> bool:
    """True if a loss of a script's own, which asks how many processes there are, is larger or smaller the more there are; all ranks call it."""
    found = []
    for times in (1, 2):
        with _evaluating(self.model), counting_times(times):
            found.append(float(loss(dict(rows))))
    by, allowed = abs(found[1] - found[0]), 0.1 * abs(found[0])
    changed, alike = count_votes(self, [by > allowed, by <= allowed != 0])  # neither where it is nan
    return changed >= alike


def count_votes(self: Any, votes: list[Any]) -> list[int]:
    """Number of ranks that give each vote, or the sums of their numbers; all ranks call it."""
    summed = torch.tensor(votes, dtype=torch.long, device=self.accelerator.device)
    dist.all_reduce(summed)
    counts: list[int] = summed.tolist()
    return counts


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, nothing is random and nothing is kept."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with evaluating(model), torch.random.fork_rng(devices), torch.no_grad():
        yield
