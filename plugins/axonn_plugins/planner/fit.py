"""Fit what training reaches of a machine (`calibration`) to one half of the corpus, and say how far off the other half is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

import numpy as np

from axonn_plugins.planner.calibration import WITHIN, Calibration
from axonn_plugins.planner.corpus import Measurement

_MOST = {"products": 1.0, "fast": 0.95, "slow": 0.95, "hidden": 1.0}
_STEPS = (1.5, 1.25, 1.1, 1.04, 1.02)
_NEAR = 1.02


def systems(rows: Sequence[Measurement]) -> list[tuple[str, str]]:
    """Pairs of framework and machine, in alphabetical order."""
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

    Args:
        rows: the corpus.
        start: where to begin.
        say: takes a line after each round.
    """
    half = fitted(rows)
    best = _descend(lambda tried: _loss([errors(each, tried) for each in _by_system(half)]), start, say)
    return replace(best, spread=spread(half, best, say))


def spread(half: Sequence[Measurement], best: Calibration, say: Callable[[str], None]) -> float:
    """Error on systems that are left out: each of the fitted half in turn, predicted by coefficients fitted to the others.

    Those are found near the ones of all, where logarithms of seconds are straight lines in logarithms of coefficients. Ranges are conformal:
    systems count alike, and one more, which is yet to come and may be off by anything (Lee, Barber & Willett 2023, arXiv 2306.06342).

    Args:
        half: what was fitted to.
        best: its coefficients.
        say: takes a line after each system.
    """
    each, found = _by_system(half), []
    lines = [_line(rows, best) for rows in each]
    for at, rows in enumerate(each):
        others = [line for place, line in enumerate(lines) if place != at]
        without = _descend(partial(_loss_of_lines, others), best) if others else best
        found.append([abs(error) for error in errors(rows, without)])
        said = f"{statistics.mean(found[-1]):.3f} off on average, {max(found[-1]):.3f} at most"
        say(f"{' on '.join(rows[0].system)} left out: {said}")
    return _four_fifths(found) / WITHIN


def errors(rows: Sequence[Measurement], calibration: Calibration) -> list[float]:
    """Logarithms of predicted over published seconds; rows without a prediction are left out."""
    plans = [(row, row.predicted(calibration=calibration)) for row in rows]
    return [math.log(plan.seconds / row.seconds) for row, plan in plans if plan is not None]


def _descend(
    loss: Callable[[Calibration], float], start: Calibration, say: Callable[[str], None] | None = None
) -> Calibration:
    """One coefficient after the other is multiplied and divided by ever smaller steps while that helps."""
    best, least = start, loss(start)
    for step in _STEPS:
        improved = True
        while improved:
            improved = False
            for name in _names(start):
                for factor in (step, 1 / step):
                    tried = replace(best, **{name: _bounded(name, getattr(best, name) * factor)})
                    if (found := loss(tried)) < least - 1e-6:
                        best, least, improved = tried, found, True
            if say is not None:
                say(f"step {step}: {least:.4f} {best}")
    return best


def _line(rows: Sequence[Measurement], at: Calibration) -> Callable[[Calibration], list[float]]:
    """Errors of some rows near given coefficients, as lines in the coefficients' logarithms."""
    names, here = _names(at), np.array(errors(rows, at))
    slopes = []
    for name in names:
        low, high = (_bounded(name, getattr(at, name) * factor) for factor in (1 / _NEAR, _NEAR))
        rise = np.subtract(errors(rows, replace(at, **{name: high})), errors(rows, replace(at, **{name: low})))
        slopes.append(rise / math.log(high / low))
    moved = lambda to: [math.log(getattr(to, name) / getattr(at, name)) for name in names]  # noqa: E731
    return lambda to: list(here + np.array(moved(to)) @ np.array(slopes))


def _names(calibration: Calibration) -> list[str]:
    """Names of the coefficients that predictions follow from."""
    return [name for name in asdict(calibration) if not name.startswith("spread")]


def _bounded(name: str, value: float) -> float:
    return min(value, _MOST.get(name, math.inf))


def _by_system(rows: Sequence[Measurement]) -> list[list[Measurement]]:
    return [[row for row in rows if row.system == system] for system in systems(rows)]


def _loss_of_lines(lines: Sequence[Callable[[Calibration], list[float]]], tried: Calibration) -> float:
    return _loss([line(tried) for line in lines])


def _loss(each: Sequence[Sequence[float]]) -> float:
    """Mean over systems, which count alike, of the root mean square of their errors."""
    return statistics.mean(math.sqrt(statistics.mean(error**2 for error in off)) for off in each)


def _four_fifths(each: Sequence[Sequence[float]]) -> float:
    """Within which 80 % of the errors lie if each of so many systems, and one more beyond them all, weighs as much as another."""
    off = sorted((error, 1 / len(one)) for one in each for error in one)
    weights = np.cumsum([weight for _, weight in off])
    place = int(np.searchsorted(weights, 0.8 * (len(each) + 1) - 1e-9))
    return off[min(place, len(off) - 1)][0]
