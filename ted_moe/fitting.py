"""Which MoE is the largest that fits: Figure 7.9 (000, section 7.4.2), by equation 7.5 or by part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ted_moe.memory import (
    TILE,
    Degrees,
    Transformer,
    base_parameters,
    paper_bytes,
    parameters,
    state_bytes,
    step_bytes,
    stock_step_bytes,
)


@dataclass(frozen=True)
class Fit:
    """A model that fits.

    Attributes:
        base: the base model's name.
        experts: in each layer that has them, one on each expert-parallel rank.
        degrees: how it is split.
        parameters: of the whole model.
        bytes: on a GPU.
    """

    base: str
    experts: int
    degrees: Degrees
    parameters: float
    bytes: float


Count = Callable[[Transformer, int, Degrees], float]
"""Bytes on a GPU of a base model with so many experts, split so."""


def by_equation(model: Transformer, experts: int, degrees: Degrees) -> float:
    """Equation 7.5 with the base model's parameters counted."""
    return paper_bytes(base_parameters(model), experts, degrees.gpus, degrees.tensor)


def by_part_ted(model: Transformer, experts: int, degrees: Degrees) -> float:
    """Model state by part, and the step of TED's tiled optimizer."""
    local = parameters(model, experts, degrees)
    return state_bytes(local, degrees) + step_bytes(local, degrees, TILE)


def by_part_stock(model: Transformer, experts: int, degrees: Degrees) -> float:
    """Model state by part, and the step of stock DeepSpeed's optimizer."""
    local = parameters(model, experts, degrees)
    return state_bytes(local, degrees) + stock_step_bytes(local, degrees)


def largest(
    bases: Mapping[str, Transformer],
    experts: Iterable[int],
    gpus: int,
    memory: float,
    tensor: int = 1,
    count: Count = by_equation,
) -> Fit | None:
    """The MoE of most parameters that fits, Figure 7.9; of equal ones the one with the lowest tensor degree.

    Args:
        bases: base models by name.
        experts: numbers to try.
        gpus: G.
        memory: bytes of a GPU.
        tensor: the highest tensor degree allowed.
        count: says how many bytes a model takes.

    Returns:
        It, or none if nothing fits.
    """
    fits = []
    for name, model in bases.items():
        for number in experts:
            for degree in range(1, min(tensor, gpus, model.hidden) + 1):
                if gpus % (degree * number) or model.hidden % degree:
                    continue
                degrees = Degrees(degree, number, gpus // (degree * number))
                size = count(model, number, degrees)
                if size <= memory:
                    fits.append(Fit(name, number, degrees, parameters(model, number).total, size))
    return max(fits, key=lambda fit: (fit.parameters, -fit.degrees.tensor), default=None)
