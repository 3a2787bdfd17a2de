"""What a model divides its loss by: the number of targets that count, as `torch.nn.functional.cross_entropy` does, or something else."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

_LOSSES = ("cross_entropy", "nll_loss", "nll_loss_nd")


class Divisor:
    """Of one model, found in its first call that has targets, by all readers alike."""

    def __init__(self) -> None:
        self.known = False
        self.counts = True
        """Whether losses are means over the targets that count; taken to be so where nothing of torch's computes the cross-entropy."""

    def agree(self, watch: Watch, readers: dist.ProcessGroup | None, device: torch.device) -> None:
        """Take what most readers with targets have seen; all of them call it.

        Args:
            watch: what this one has.
            readers: ranks that read different rows.
            device: of their collectives.
        """
        votes = [watch.kept > 0 and watch.divides, watch.kept > 0 and not watch.divides]
        summed = torch.tensor(votes, dtype=torch.long, device=device)
        dist.all_reduce(summed, group=readers)
        means, others = summed.tolist()
        self.known, self.counts = means + others > 0, means >= others


class Watch(TorchFunctionMode):
    """Sees whether cross-entropies are divided by the number of targets that count.

    Args:
        kept: that number.
    """

    def __init__(self, kept: int) -> None:
        super().__init__()
        self.kept = kept
        self._seen, self._divided = False, False

    @property
    def divides(self) -> bool:
        """Whether they are; also where none was seen."""
        return self._divided or not self._seen

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
            self._loss(kwargs.get("reduction", "mean"))
        elif self._seen and not self._divided and isinstance(result, Tensor):
            given = [*args, *kwargs.values()]
            if "div" in name:
                self._divided = any(self._is(one, self.kept) for one in given[1:])
            elif "mul" in name:
                self._divided = any(self._is(one, 1 / max(self.kept, 1)) for one in given)
            elif name in ("mean", "nanmean"):
                self._divided = given[0].numel() == self.kept * max(result.numel(), 1)
        return result

    def _module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        ours = getattr(
            sys.modules.get("axonn_tp.layers.cross_entropy"), "CrossEntropyLoss", ()
        )  # imported where it is in use
        if isinstance(module, ours):  # over split classes, by no function of torch
            self._loss(module.reduction)

    def _loss(self, reduction: str) -> None:
        self._seen = True
        self._divided |= reduction == "mean"

    @staticmethod
    def _is(value: Any, number: float) -> bool:
        if isinstance(value, Tensor):
            value = value.detach().item() if value.numel() == 1 and not value.is_complex() else None
        return isinstance(value, int | float) and abs(value - number) <= 1e-6 * number
