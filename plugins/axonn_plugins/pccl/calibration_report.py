"""Published speedups beside those from tables alone and the calibrated ones, and whether these are as good as is said of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import geometric_mean

from axonn_plugins.pccl.calibration import Calibrated, halves
from axonn_plugins.pccl.published import Published
from axonn_plugins.pccl.sweep import collectives, numbers, span
from axonn_plugins.pccl.systems import Specified

_HEAD = (
    "published in",
    "faster",
    "slower",
    "of",
    "processes",
    "MB",
    "published",
    "tables alone",
    "calibrated",
    "off",
    "",
)


def table(calibrated: Sequence[Calibrated]) -> str:
    """Markdown: a row for each published number; `off` is the factor of the calibrated one."""
    rows = [_HEAD, ("---",) * len(_HEAD)]
    for each in calibrated:
        specified = Specified(each.cluster)
        for point in each.cluster.published:
            found = each.range(point)
            rows.append(
                (
                    f"{point.cluster}, {point.place}",
                    point.system,
                    point.over,
                    collectives(point).replace("_", "-"),
                    span(*point.processes),
                    span(*point.megabytes),
                    numbers(point),
                    span(*specified.range(point)),
                    span(*found),
                    f"{point.off(*found):.2f}",
                    "fitted" if each.calibration.fits(point) else "held out",
                )
            )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def verdict(calibrated: Sequence[Calibrated]) -> list[str]:
    """Sentences on all that is not as the calibration says."""
    wrong = []
    for half, found in halves(calibrated).items():
        calibration = calibrated[0].calibration
        off, numbers = (geometric_mean(values) for values in _values(found))
        if off > calibration.bounds[half]:
            wrong.append(f"{half}: off by {off:.3f} times, more than the bound {calibration.bounds[half]:g}")
        if not math.isclose(off, calibration.errors[half], abs_tol=2e-3):
            wrong.append(
                f"{half}: off by {off:.3f} times, not {calibration.errors[half]:g} as calibration.toml says; see --fit"
            )
        if not math.isclose(numbers, calibration.numbers[half], rel_tol=2e-4):
            wrong.append(
                f"{half}: the published numbers are {numbers:.5g} on average, not {calibration.numbers[half]:g} as when they were fitted; see --fit"
            )
    return wrong


def summary(calibrated: Sequence[Calibrated]) -> str:
    """Number of figures in each half, and their mean factor from the published ones."""
    parts = []
    for half, found in halves(calibrated).items():
        off, _ = _values(found)
        parts.append(
            f"{half}: {len(off)} numbers, off by {geometric_mean(off):.2f} times on average, {max(off):.2f} at most"
        )
    return "; ".join(parts)


def _values(found: Sequence[tuple[Published, float]]) -> tuple[list[float], list[float]]:
    """Factors, and published numbers."""
    return [factor for _, factor in found], [end for point, _ in found for end in (point.low, point.high)]


def report(calibrated: Sequence[Calibrated]) -> tuple[str, list[str]]:
    """The table and its errors, and what is not as the calibration says."""
    return f"{table(calibrated)}\n\n{summary(calibrated)}", verdict(calibrated)
