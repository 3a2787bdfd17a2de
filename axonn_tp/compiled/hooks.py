"""Hooks of modules that `torch.compile` traces with them."""

from __future__ import annotations

from torch import nn


def keep_slow_path(module: nn.Module, inputs: tuple) -> None:
    """Does nothing: that there is a hook keeps `nn.TransformerEncoderLayer` off a fast path which reads weights directly."""


def enter(model: nn.Module, inputs: tuple) -> None:
    """The model's forward begins, in which code that reads a split layer's weight finds it whole."""
    model.axonn_gathers.forwards += 1  # type: ignore[union-attr, operator]


def leave(model: nn.Module, inputs: tuple, output: object) -> None:
    """The model's forward ends."""
    model.axonn_gathers.forwards -= 1  # type: ignore[union-attr, operator]
