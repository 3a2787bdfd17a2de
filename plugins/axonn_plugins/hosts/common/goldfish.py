"""The labels of the calls of a model, with -100 where the goldfish loss leaves targets out."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_plugins.config import ConfigError
from axonn_plugins.config.goldfish import Goldfish
from axonn_plugins.goldfish import IGNORED, goldfish_labels
from axonn_plugins.hosts.common.divisor import Divisor, Watch

_KEY = "axonn.goldfish.labels"
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class LabelMask:
    """Masks whole rows of labels, before anything splits them.

    Args:
        block: what to leave out.
        model: whose calls have labels; None: they come by `labels` alone.

    Raises:
        ConfigError: its forward takes no such argument.
    """

    def __init__(self, block: Goldfish, model: nn.Module | None = None) -> None:
        self.block = block
        self._names: list[str] = []
        self._shifts = bool(block.shifts)
        self._divisor = Divisor()
        if model is None:
            return
        kinds = {name: each.kind for name, each in inspect.signature(model.forward).parameters.items()}
        self._names = [name for name, kind in kinds.items() if kind in _BY_PLACE]
        by_name = isinstance(block.labels, str)
        taken = kinds if by_name else range(len(self._names))
        rest = inspect.Parameter.VAR_KEYWORD if by_name else inspect.Parameter.VAR_POSITIONAL
        if block.labels not in taken and rest not in kinds.values():
            raise ConfigError(
                f"{_KEY} = {block.labels!r} is no argument of {type(model).__name__}.forward, which takes {', '.join(kinds)}; name the one that "
                "has the labels, or leave axonn.goldfish out and mask them by axonn_plugins.goldfish.goldfish_labels"
            )
        if block.shifts is None:
            self._shifts = block.labels == "labels" and _is_causal_of_transformers(model)

    def active(self, training: bool) -> bool:
        """True if labels are masked in a model that trains, or that does not."""
        return training or self.block.evaluation

    def arguments(self, inputs: tuple, keywords: dict[str, Any], training: bool) -> tuple[tuple, dict[str, Any]]:
        """The arguments of a call with its labels masked.

        Args:
            inputs: given by place.
            keywords: given by name.
            training: whether the model is in training mode.

        Raises:
            ConfigError: the model computes a loss without labels, which nothing could be left out of.
        """
        if not self.active(training):
            return inputs, keywords
        place = self.place(inputs, keywords)
        if place is None:
            if training and torch.is_grad_enabled():
                raise ConfigError(
                    f"{_KEY} = {self.block.labels!r}, and the model was called without that argument while it trains, so that nothing could be "
                    "left out of the loss; pass the labels to the model, or leave axonn.goldfish out and mask them by "
                    "axonn_plugins.goldfish.goldfish_labels"
                )
            return inputs, keywords
        if isinstance(place, int):
            return (*inputs[:place], self.labels(inputs[place]), *inputs[place + 1 :]), keywords
        if place != "shift_labels" and keywords.get("shift_labels") is not None:
            raise ConfigError(
                f"{_KEY} = {place!r}, and the model was given shift_labels, of which it computes the loss; name those"
            )
        return inputs, {**keywords, place: self.labels(keywords[place])}

    def place(self, inputs: tuple, keywords: dict[str, Any]) -> int | str | None:
        """Where the labels are in a call: a place of `inputs`, or a name; None where they are not given."""
        wanted = self.block.labels
        name = self._names[wanted] if isinstance(wanted, int) and wanted < len(self._names) else wanted
        if isinstance(name, str) and keywords.get(name) is not None:
            return name
        place = self._names.index(name) if name in self._names else wanted
        return place if isinstance(place, int) and place < len(inputs) and inputs[place] is not None else None

    def weight(
        self,
        inputs: tuple,
        keywords: dict[str, Any],
        training: bool,
        readers: dist.ProcessGroup | None,
        device: torch.device,
    ) -> Weight | None:
        """The weight that makes the mean of the readers' losses the mean over all kept targets, as one process computes it.

        Args:
            inputs: what `arguments` returned: given by place,
            keywords: and by name.
            training: whether the model is in training mode.
            readers: ranks that read different rows, all of which call it; None: all ranks.
            device: of their collectives.

        Returns:
            None where nothing was masked, or the script itself says how many targets to divide by.
        """
        place = self.place(inputs, keywords) if self.active(training) else None
        if place is None or keywords.get("num_items_in_batch") is not None:
            return None
        return self.weight_of(inputs[place] if isinstance(place, int) else keywords[place], readers, device)

    def weight_of(self, labels: Tensor, readers: dist.ProcessGroup | None, device: torch.device) -> Weight | None:
        """`weight` of masked labels; None where one rank reads all rows."""
        if dist.get_world_size(readers) == 1:
            return None
        return Weight(partial(self.kept, labels), readers, self._divisor, device)

    def kept(self, labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
        """The number of targets that masked labels have, or the sum of their class weights."""
        targets = labels[..., 1:] if self._shifts else labels
        kept = targets.ne(IGNORED)
        return (
            kept.sum()
            if class_weights is None
            else class_weights.double()[targets[kept].to(class_weights.device)].sum()
        )

    def labels(self, labels: Any) -> Tensor:
        """Labels of whole rows, masked.

        Args:
            labels: integers (..., rows, tokens).

        Raises:
            ConfigError: they are none.
        """
        if not isinstance(labels, Tensor) or labels.dim() < 2 or labels.is_floating_point():
            kind = (
                f"{labels.dtype} of shape {tuple(labels.shape)}"
                if isinstance(labels, Tensor)
                else type(labels).__name__
            )
            raise ConfigError(
                f"{_KEY} = {self.block.labels!r} are {kind}, and the goldfish loss is of token ids in rows, integers of shape (rows, tokens); "
                "name the argument that has these"
            )
        block = self.block
        settings = {"strategy": block.strategy, "seed": block.seed}
        return goldfish_labels(labels, block.k, block.h, shifts=self._shifts, **settings)  # type: ignore[arg-type]

    def several(self, labels: Any) -> Any:
        """The labels that a PipelineModule's loss gets, masked: a tensor, or several of which the key says the place.

        Raises:
            ConfigError: it says none.
        """
        if isinstance(labels, Tensor):
            return self.labels(labels)
        place = self.block.labels
        if not isinstance(labels, (tuple, list)) or not isinstance(place, int) or place >= len(labels):
            size = f"{len(labels)} tensors" if isinstance(labels, (tuple, list)) else type(labels).__name__
            raise ConfigError(
                f"{_KEY} = {place!r}, and the labels of the PipelineModule are {size}; give the place of the one that has token ids, from 0"
            )
        return (*labels[:place], self.labels(labels[place]), *labels[place + 1 :])


class Weight:
    """The share of the kept targets that this rank has, as a factor of a loss that is their mean.

    A loss that is divided by something else, as a sum, stays the reader's: hosts take the mean of the readers'. The loss is computed within
    ``with weight:``, which finds out in a model's first call; class weights, which may be a batch's own, are taken from each call.

    Args:
        count: the number of targets of this rank's rows, or the sum of their class weights if given those.
        readers: ranks that read different rows.
        divisor: of the model's losses; changed where it is not known.
        device: of the readers' collectives.
    """

    def __init__(
        self,
        count: Callable[[Tensor | None], Tensor],
        readers: dist.ProcessGroup | None,
        divisor: Divisor,
        device: torch.device,
    ) -> None:
        self._count, self._readers, self._divisor, self._device = count, readers, divisor, device
        self._ranks = dist.get_world_size(readers)
        self._watch = None if divisor.known and not divisor.weighed else Watch(count)
        self._sum(count(None))

    def _sum(self, kept: Tensor) -> None:
        self._kept = kept.to(self._device)
        self._all = self._kept.clone()
        self._work: Any = dist.all_reduce(self._all, group=self._readers, async_op=True)

    def __enter__(self) -> Weight:
        if self._watch is not None:
            self._watch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._watch is not None:
            self._watch.__exit__(*error)

    def of(self, output: Any) -> Any:
        """Weigh the loss in the output of a model: a scalar, an entry named `loss`, or the first scalar of several."""
        self._work.wait()
        if self._watch is not None and not self._divisor.known:
            self._divisor.agree(self._watch, self._readers, self._device)
        if self._divisor.weighed and self._watch is not None:
            self._sum_weights(self._watch.class_weights)
        elif not self._divisor.counts:
            return output
        if isinstance(output, Tensor):
            return self._weigh(output)
        named = output.get("loss") if isinstance(output, MutableMapping) else getattr(output, "loss", None)
        if isinstance(named, Tensor):
            return _with_loss(output, self._weigh(named))
        if not isinstance(output, (tuple, list)):
            return output
        scalars = (place for place, one in enumerate(output) if isinstance(one, Tensor) and _is_scalar(one))
        if (place := next(scalars, None)) is None:
            return output
        found = [*output[:place], self._weigh(output[place]), *output[place + 1 :]]
        return output._make(found) if hasattr(output, "_make") else type(output)(found)

    def _sum_weights(self, class_weights: Tensor | None) -> None:
        nowhere = torch.tensor(math.nan, dtype=torch.float64)
        self._sum(nowhere if class_weights is None else self._count(class_weights))
        self._work.wait()
        if self._all.isnan():
            raise ConfigError(
                "axonn.goldfish: the model's cross-entropy had class weights in its first call, and in this one it had none, or not a number, on "
                "some rank, so that the readers' means cannot be made the mean of all rows; give the same weights in each call and on each rank"
            )

    def _weigh(self, loss: Tensor) -> Tensor:
        if not _is_scalar(loss):
            return loss
        factor = self._kept.double() * self._ranks / self._all
        # The mean over no targets is not a number.
        return torch.where(self._kept > 0, loss * factor.to(loss.dtype), torch.zeros_like(loss))


def _is_scalar(tensor: Tensor) -> bool:
    return not tensor.dim() and tensor.is_floating_point()


def _with_loss(output: Any, loss: Tensor) -> Any:
    if isinstance(output, MutableMapping):
        output["loss"] = loss
        return output
    if hasattr(output, "_replace"):
        return output._replace(loss=loss)
    if is_dataclass(output):
        return replace(output, loss=loss)  # type: ignore[type-var]
    output.loss = loss
    return output


def _is_causal_of_transformers(model: nn.Module) -> bool:
    losses: Any = sys.modules.get("transformers.loss.loss_utils")
    if losses is None or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    return getattr(model, "loss_function", None) is losses.ForCausalLMLoss
