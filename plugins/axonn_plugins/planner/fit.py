"""Fit what training reaches of a machine (`calibration`) to one half of the corpus, and say how far off the other half is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from axonn_plugins.planner.calibration import WITHIN, Calibration
from axonn_plugins.planner.corpus import Measurement

_MOST = {"products": 1.0, "fast": 0.95, "slow": 0.95, "hidden": 1.0}
_STEPS = (1.5, 1.25, 1.1, 1.04, 1.02)


def systems(rows: Sequence[Measurement]) -> list[tuple[str, str]]:
    """What trained where, in alphabetical order."""
    return sorted({row.system for row in rows})


def held_out(rows: Sequence[Measurement]) -> list[Measurement]:
    """Rows of every second system, by the alphabet."""
    chosen = set(systems(rows)[1::2])
    return [row for row in rows if row.system in chosen]


def fitted(rows: Sequence[Measurement]) -> list[Measurement]:
    """The others."""
    chosen = set(systems(rows)[::2])
    return [row for row in rows if row.system in chosen]


def fit(rows: Sequence[Measurement], start: Calibration, say: Callable[[str], None]) -> Calibration:
    """The coefficients whose predictions of the fitted half are least off, each system counting alike.

    One coefficient after the other is multiplied and divided by ever smaller steps while that helps.

    Args:
        rows: the corpus.
        start: where to begin.
        say: takes a line after each round.
    """
    half = fitted(rows)
    best, least = start, _loss(half, start)
    names = [name for name in asdict(start) if name != "spread"]
    for step in _STEPS:
        improved = True
        while improved:
            improved = False
            for name in names:
                for factor in (step, 1 / step):
                    value = min(getattr(best, name) * factor, _MOST.get(name, math.inf))
                    tried = replace(best, **{name: value})
                    loss = _loss(half, tried)
                    if loss < least - 1e-6:
                        best, least, improved = tried, loss, True
            say(f"step {step}: {least:.4f} {best}")
    return replace(best, spread=_spread(held_out(rows), best))


def errors(rows: Sequence[Measurement], calibration: Calibration) -> list[float]:
    """Logarithms of predicted over published seconds; rows without a prediction are left out."""
    plans = [(row, row.predicted(calibration=calibration)) for row in rows]
    return [math.log(plan.seconds / row.seconds) for row, plan in plans if plan is not None]


def _loss(rows: Sequence[Measurement], calibration: Calibration) -> float:
    of = {system: [row for row in rows if row.system == system] for system in systems(rows)}
    off = ([error**2 for error in errors(each, calibration)] for each in of.values())
    return statistics.mean(math.sqrt(statistics.mean(each)) for each in off)


def _spread(rows: Sequence[Measurement], calibration: Calibration) -> float:
    """With which 80 % of the rows lie inside the range; rounded up to what the file has, so that the last of them does."""
    off = sorted(abs(error) for error in errors(rows, calibration))
    return math.ceil(1e4 * off[math.ceil(0.8 * len(off)) - 1] / WITHIN) / 1e4
