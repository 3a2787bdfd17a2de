"""Optimizers of a chain, which z makes of one: Megatron has each act by itself, or gives something to the first alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from megatron.core.optimizer.optimizer import ChainedOptimizer

from axonn_plugins.hosts.megatron.originals import Originals


def install(originals: Originals) -> None:
    """Have the optimizers of a chain do as one would."""
    originals.wrap(ChainedOptimizer, "__init__", _of_what_is_trained)
    originals.wrap(ChainedOptimizer, "prepare_grads", _of_one_scale)
    originals.wrap(ChainedOptimizer, "_split_state_dict", _each_of_all_chunks)


def _of_what_is_trained(original: Callable[..., None]) -> Callable[..., None]:
    """Where z splits all that is trained, there is one of nothing, on every rank, which has no state to save."""

    @wraps(original)
    def init(self: Any, chained_optimizers: list[Any]) -> None:
        trained = [one for one in chained_optimizers if not getattr(one, "is_stub_optimizer", False)]
        original(self, trained or chained_optimizers)

    return init


def _of_one_scale(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Each has a scale of the loss, which goes down where it found a gradient that is not finite; let all go down together.

    Else the others would divide by another one than the loss is multiplied with from then on.
    """

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


def _each_of_all_chunks(original: Callable[..., list]) -> Callable[..., list]:
    """Each has parameters of all chunks of the model, of which a checkpoint has float32 values (--load-main-params-from-ckpt)."""

    @wraps(original)
    def split(self: Any, state_dict: Any) -> list:
        return [state_dict if hasattr(one, "model_chunks") else None for one in self.chained_optimizers]

    return split
