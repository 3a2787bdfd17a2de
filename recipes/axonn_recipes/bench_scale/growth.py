"""The growth of a cost with the number of ranks: a constant, and a power of the ranks above it; and the bars."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

LINEAR, QUADRATIC = 1.3, 1.5
"""Exponents up to which growth is called linear, and from which on the square is what it tends to."""
FLAT = 1.3
"""A cost that grows by less than this from the fewest ranks to the most is called flat."""
SECONDS, BYTES = 5.0, 100 * 2**20
"""The bar at `AT` ranks of a cost that grows linearly."""
AT = 32768
NOISE = 0.01
"""Share of a bar: a cost that is less at `AT` ranks is within it however it seems to grow."""
_STEPS = 300


@dataclass(frozen=True)
class Growth:
    """A cost of ``constant + factor · ranks^exponent``.

    Attributes:
        constant: what it costs whatever the ranks.
        factor: of the power.
        exponent: of the ranks; 0 for a flat one.
    """

    constant: float
    factor: float
    exponent: float

    def at(self, ranks: float) -> float:
        """The cost at a number of ranks."""
        return self.constant + self.factor * ranks**self.exponent

    @property
    def word(self) -> str:
        """The growth in a word."""
        if self.exponent == 0:
            return "flat"
        return f"p^{self.exponent:.2f}"


def fitted(costs: Mapping[int, float]) -> Growth:
    """The growth with the least relative errors; of several exponents that fit alike the one next to 1.

    The constant is no more than the cost of the fewest ranks and not negative, so what is fitted is the growth above it.

    Args:
        costs: by number of ranks, none negative.
    """
    points = sorted(costs.items())
    least, most = min(costs.values()), max(costs.values())
    if len(points) < 2 or most <= FLAT * least:
        return Growth(sum(costs.values()) / len(points), 0.0, 0.0)
    scale = [1 / max(cost, most * 1e-6) for _, cost in points]
    fits = []
    for step in range(_STEPS + 1):
        exponent = 0.01 * step
        found = _line([(ranks**exponent, cost, weight) for (ranks, cost), weight in zip(points, scale, strict=True)])
        if found is None or exponent == 0:
            continue
        constant, factor = found
        wrong = [(constant + factor * r**exponent - cost) * w for (r, cost), w in zip(points, scale, strict=True)]
        fits.append((math.sqrt(sum(each * each for each in wrong) / len(wrong)), Growth(constant, factor, exponent)))
    best = min(error for error, _ in fits)
    alike = [growth for error, growth in fits if error <= 1.05 * best + 1e-4]
    return min(alike, key=lambda growth: abs(growth.exponent - 1))


def _line(points: list[tuple[float, float, float]]) -> tuple[float, float] | None:
    """Constant and slope of y over x with weights, both at least 0."""
    weights = [weight * weight for _, _, weight in points]
    total = sum(weights)
    x_mean = sum(w * x for w, (x, _, _) in zip(weights, points, strict=True)) / total
    y_mean = sum(w * y for w, (_, y, _) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - x_mean) ** 2 for w, (x, _, _) in zip(weights, points, strict=True))
    if spread == 0:
        return None
    slope = sum(w * (x - x_mean) * (y - y_mean) for w, (x, y, _) in zip(weights, points, strict=True)) / spread
    constant = y_mean - slope * x_mean
    if slope < 0:
        return y_mean, 0.0
    if constant < 0:  # through the origin
        squares = sum(w * x * x for w, (x, _, _) in zip(weights, points, strict=True))
        return 0.0, sum(w * x * y for w, (x, y, _) in zip(weights, points, strict=True)) / squares
    return constant, slope


@dataclass(frozen=True)
class Verdict:
    """A curve beside the bars.

    Attributes:
        growth: fitted.
        value: at `AT` ranks; measured there, or by the fit.
        measured: whether it was.
        met: whether the bars hold.
    """

    growth: Growth
    value: float
    measured: bool
    met: bool


def judge(costs: Mapping[int, float], bar: float) -> Verdict:
    """Fit a curve, and compare it with the bars: no square of the ranks, and at `AT` no more than `bar`."""
    growth = fitted(costs)
    measured = AT in costs
    value = costs[AT] if measured else growth.at(AT)
    small = value <= NOISE * bar
    return Verdict(growth, value, measured, small or (growth.exponent < QUADRATIC and value <= bar))
