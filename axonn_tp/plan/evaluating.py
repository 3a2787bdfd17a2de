"""Runs of a model in evaluation mode that its training knows nothing of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from axonn_tp.layers.weight import Split

_PLAIN = (bool, int, float, str, type(None))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, a model is in evaluation mode; behind it, its modules have their modes again, and the numbers that forwards note on them."""
    kept = [
        (module, {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)})
        for module in model.modules()
        if not isinstance(module, Split)
    ]
    split = [module for module in model.modules() if isinstance(module, Split) and module.training]
    model.eval()
    try:
        yield
    finally:
        for module, values in kept:
            vars(module).update(values)
        for module in split:
            module.training = True
