"""One scale of the loss for all optimizers of a grid, of which z makes two: Megatron has each move a scale of its own.

Where only one of them found a gradient that is not finite, its scale alone went down, and the others would have divided by another
one than the loss was multiplied with from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from megatron.core.optimizer.optimizer import ChainedOptimizer

from axonn_plugins.hosts.megatron.originals import Originals


def install(originals: Originals) -> None:
    """Have what one optimizer finds move the scales of all."""
    originals.wrap(ChainedOptimizer, "prepare_grads", _alike)


def _alike(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    @wraps(original)
    def prepare_grads(self: Any) -> bool:
        scalers = [getattr(one, "grad_scaler", None) for one in self.chained_optimizers]
        before = [(scaler, scaler.state_dict()) for scaler in scalers if scaler is not None]
        found = original(self)
        if found:
            for scaler, state in before:
                scaler.load_state_dict(state)
                scaler.update(True)
        return found

    return prepare_grads
