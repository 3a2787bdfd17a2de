"""TRL's BEMACallback averages whole weights, as one process has them, also of a model whose weights are split; else nothing is different."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import torch


def patch(module: ModuleType) -> None:
    """Add to ``trl.trainer.callbacks``; harmless when called again."""
    kind: Any = getattr(module, "BEMACallback", None)
    if kind is None or getattr(kind.on_step_end, "axonn", False):
        return
    kind.on_train_begin = _beginning(kind.on_train_begin)
    kind.on_step_end = _updating(kind.on_step_end)


def _beginning(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def on_train_begin(self: Any, args: Any, state: Any, control: Any, model: Any, **named: Any) -> None:
        """TRL's own, which remembers the weights with which training begins."""
        known = len(self.thetat_params)
        original(self, args, state, control, model, **named)
        with _whole(model) as split, torch.no_grad():
            if split:
                for held in (self.theta0_params, self.ema_params):
                    held[known:] = [weight.detach().clone().to(self.device) for weight in self.thetat_params[known:]]

    return on_train_begin


def _updating(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def on_step_end(self: Any, args: Any, state: Any, control: Any, model: Any, **named: Any) -> None:
        """TRL's own, which reads weights in some steps alone."""
        since = state.global_step - self.update_after
        if since < 0 or since % self.update_freq:
            original(self, args, state, control, model, **named)
            return
        with _whole(model):
            original(self, args, state, control, model, **named)

    on_step_end.axonn = True  # type: ignore[attr-defined]
    return on_step_end


@contextmanager
def _whole(model: Any) -> Iterator[bool]:
    """Inside, the parameters of split layers are whole; all ranks call it. Gives whether there are any."""
    from axonn_plugins.hosts.transformers.peft_patch import gathered

    shards = gathered(model)
    try:
        yield bool(shards)
    finally:
        for parameter, (_, _, shard) in shards.items():
            parameter.data = shard
