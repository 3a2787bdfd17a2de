"""Losses of models that take ``num_items_in_batch`` and do not divide by it, as T5's and most classifiers'.

They give a mean over their own rows, and the Trainer multiplies it by the number of readers as if it were their part of a sum. Here a
reader's mean counts by its items, so that the losses of all readers make one process's mean.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from axonn_plugins.hosts.transformers.readers import has_block

_VALUES = {"item", "tolist", "__int__", "__float__", "__index__"}


class _Reading(TorchFunctionMode):
    """Notices whether something is divided by a number of items."""

    def __init__(self, items: Tensor) -> None:
        super().__init__()
        self._items, self.found = items, False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if not self.found and ("div" in name or name in _VALUES):
            self.found = any(map(self._is_it, tree_leaves((args, kwargs))))
        return func(*args, **(kwargs or {}))

    def _is_it(self, value: Any) -> bool:
        """By value, for what a model is given may be a copy."""
        number = isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad
        return number and bool(value == self._items)


def weighed_by_items(original: Callable[..., Any]) -> Callable[..., Any]:
    """The Trainer's `compute_loss`; whether the loss is divided by the items is seen in its first call."""

    @wraps(original)
    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **more: Any
    ) -> Any:
        labels, given = inputs.get("labels"), {"return_outputs": return_outputs, **more}
        given["num_items_in_batch"] = num_items_in_batch
        counted = isinstance(num_items_in_batch, Tensor) and isinstance(labels, Tensor)
        counted = counted and self.args.average_tokens_across_devices and self.accelerator.num_processes > 1
        if not counted or not has_block(self.accelerator):
            return original(self, model, inputs, **given)
        divided = getattr(self, "_axonn_divides", None)
        if divided is None:
            with _Reading(num_items_in_batch) as reading:
                found = original(self, model, inputs, **given)
            divided = self._axonn_divides = reading.found
        else:
            found = original(self, model, inputs, **given)
        if divided:
            return found
        items = (labels[..., 1:] if getattr(self, "_loss_shifts_labels", False) else labels).ne(-100).sum()
        every = self.accelerator.gather(items.to(num_items_in_batch.device))  # of one that counts nothing, none
        share = items / every.sum().clamp(min=1)
        return (found[0] * share, *found[1:]) if return_outputs else found * share

    return compute_loss
