"""Medians with their spread, of times and of ratios round by round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, lower and upper quartile: `median`, `low` and `high`."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return {"median": middle, "low": low, "high": high}


def worst(values: Sequence[float]) -> int:
    """Place of the largest, or of the first that is not a number, which is worse than all."""
    return max(range(len(values)), key=lambda place: (math.isnan(values[place]), values[place]))


def ratios(theirs: Sequence[float], ours: Sequence[float]) -> list[float]:
    """Their time over ours, round by round: above 1, ours is faster."""
    return [over / under for over, under in zip(theirs, ours, strict=True)]


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and range of `ratios`."""
    rounds = ratios(theirs, ours)
    found = spread(rounds)
    return {
        "median": found["median"],
        "quartiles": [found["low"], found["high"]],
        "range": [min(rounds), max(rounds)],
    }
