"""Hooks of modules that `torch.compile` traces with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def keep_slow_path(module: nn.Module, inputs: tuple) -> None:
    """Does nothing: that there is a hook keeps `nn.TransformerEncoderLayer` off a fast path which reads weights directly."""


def enter(model: nn.Module, inputs: tuple) -> None:
    """The model's forward begins, in which code that reads a split layer's weight finds it whole."""
    model.axonn_gathers.forwards += 1  # type: ignore[union-attr, operator]


def leave(model: nn.Module, inputs: tuple, output: object) -> None:
    """The model's forward ends."""
    model.axonn_gathers.forwards -= 1  # type: ignore[union-attr, operator]


def count(module: nn.Module, names: Iterable[str], layer: nn.Module, shares: int) -> None:
    """Divide attributes of a module while its forward runs, as `axonn_tp.plan.counted_attributes.count_locally`; its calls do not nest.

    Args:
        module: whose forward reads them.
        names: of the attributes.
        layer: one of the module's that is split; in `as_serial`, where its class is another, counts stay whole.
        shares: divides them.
    """
    names, kind = tuple(names), type(layer)

    def enter(module: nn.Module, *_: Any) -> None:
        if type(layer) is kind:
            for name in names:
                setattr(module, name, getattr(module, name) // shares)

    def leave(module: nn.Module, *_: Any) -> None:
        if type(layer) is kind:
            for name in names:
                setattr(module, name, getattr(module, name) * shares)

    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_hook(leave, always_call=True)
