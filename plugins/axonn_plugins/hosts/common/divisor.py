"""The divisor of a model's loss: the number of targets that count, as in `torch.nn.functional.cross_entropy`, or another."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

_LOSSES = ("cross_entropy", "nll_loss", "nll_loss_nd")


class Divisor:
    """The divisor of a model's loss, found in its first call that has targets, by all readers alike.

    Attributes:
        known: whether it was found.
        counts: whether losses are means over the targets that count; taken to be so where nothing of torch's computes the cross-entropy.
        weighed: whether they are means by the class weights of these targets.
    """

    def __init__(self) -> None:
        self.known, self.counts, self.weighed = False, True, False

    def agree(self, watch: Watch, readers: dist.ProcessGroup | None, device: torch.device) -> None:
        """Take what most readers with targets have seen; all of them call it.

        Args:
            watch: what this one has.
            readers: ranks that read different rows.
            device: of their collectives.
        """
        votes = [watch.kept > 0 and watch.divides_by == by for by in ("targets", "weights", None)]
        summed = torch.tensor(votes, dtype=torch.long, device=device)
        dist.all_reduce(summed, group=readers)
        targets, weights, others = summed.tolist()
        self.known = targets + weights + others > 0
        self.counts = targets >= max(weights, others)
        self.weighed = not self.counts and weights >= others


class Watch(TorchFunctionMode):
    """Sees what cross-entropies are divided by.

    Args:
        count: the number of targets that count, or the sum of their class weights if given those.

    Attributes:
        kept: that number.
        class_weights: those of the last cross-entropy that had some.
    """

    def __init__(self, count: Callable[[Tensor | None], Tensor]) -> None:
        super().__init__()
        self._count, self.kept = count, int(count(None))
        self.class_weights: Tensor | None = None
        self._numbers: dict[str, float] = {"targets": self.kept}
        self._seen = False
        self._by: str | None = None

    @property
    def divides_by(self) -> str | None:
        """One of "targets" (also where no cross-entropy was seen), "weights" and None (by something else)."""
        return self._by if self._seen else "targets"

    def __enter__(self) -> Any:
        self._hook = register_module_forward_hook(self._module)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result, name = func(*args, **kwargs), getattr(func, "__name__", "")
        if name in _LOSSES:
            self._loss(kwargs.get("reduction", "mean"), kwargs.get("weight"))
        elif self._seen and self._by is None and isinstance(result, Tensor):
            given = [*args, *kwargs.values()]
            for by, number in self._numbers.items():
                if (
                    ("div" in name and any(self._is(one, number) for one in given[1:]))
                    or ("mul" in name and number and any(self._is(one, 1 / number) for one in given))
                    or (name in ("mean", "nanmean") and given[0].numel() == number * max(result.numel(), 1))
                ):
                    self._by = by
        return result

    def _module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        ours = getattr(
            sys.modules.get("axonn_tp.layers.cross_entropy"), "CrossEntropyLoss", ()
        )  # imported where it is in use
        if isinstance(module, ours):  # over split classes, by no function of torch
            self._loss(module.reduction, module.weight)

    def _loss(self, reduction: str, class_weights: Tensor | None) -> None:
        self._seen = True
        if class_weights is not None:
            self.class_weights = class_weights.detach()
            self._numbers["weights"] = float(self._count(self.class_weights))
        if reduction == "mean":
            self._by = "targets" if class_weights is None else "weights"

    @staticmethod
    def _is(value: Any, number: float) -> bool:
        if isinstance(value, Tensor):
            value = value.detach().item() if value.numel() == 1 and not value.is_complex() else None
        return isinstance(value, int | float) and abs(value - number) <= 1e-6 * number
