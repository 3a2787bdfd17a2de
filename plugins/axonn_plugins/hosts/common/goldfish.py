"""The labels of the calls of a model, with -100 where the goldfish loss leaves targets out."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from axonn_plugins.config import ConfigError
from axonn_plugins.config.goldfish import Goldfish
from axonn_plugins.goldfish import goldfish_labels

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
        """Whether labels are masked in a model that trains, or does not."""
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
        wanted = self.block.labels
        name = self._names[wanted] if isinstance(wanted, int) and wanted < len(self._names) else wanted
        place = self._names.index(name) if name in self._names else wanted
        if isinstance(name, str) and keywords.get(name) is not None:
            if name != "shift_labels" and keywords.get("shift_labels") is not None:
                raise ConfigError(
                    f"{_KEY} = {wanted!r}, and the model was given shift_labels, of which it computes the loss; name those"
                )
            return inputs, {**keywords, name: self.labels(keywords[name])}
        if isinstance(place, int) and place < len(inputs) and inputs[place] is not None:
            return (*inputs[:place], self.labels(inputs[place]), *inputs[place + 1 :]), keywords
        if training and torch.is_grad_enabled():
            raise ConfigError(
                f"{_KEY} = {wanted!r}, and the model was called without that argument while it trains, so that nothing could be left out of "
                "the loss; pass the labels to the model, or leave axonn.goldfish out and mask them by axonn_plugins.goldfish.goldfish_labels"
            )
        return inputs, keywords

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
        """What a PipelineModule's loss gets as labels: a tensor, or several of which the key says the place.

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


def _is_causal_of_transformers(model: nn.Module) -> bool:
    losses: Any = sys.modules.get("transformers.loss.loss_utils")
    if losses is None or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    return getattr(model, "loss_function", None) is losses.ForCausalLMLoss
