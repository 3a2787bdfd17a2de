"""The report of a run: a table and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from axonn_plugins.observe.figures import Picture
from axonn_recipes.bench.output import extremes, table
from axonn_recipes.bench_tp.measure import Side


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Correlation of ranks; equal values share the mean of theirs."""
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def results(settings: Mapping[str, Any], measured: Sequence[Side], predicted: Mapping[str, Sequence[float]]) -> dict:
    """Everything as what JSON can hold; seconds. Grids are in the order of their measured medians."""
    took = [side.median for side in measured]
    order = sorted(range(len(took)), key=lambda i: took[i])
    judged = {}
    for how, values in predicted.items():
        ranks = _ranks(values)
        judged[how] = {
            "spearman": spearman(took, values),
            "place_of_the_measured_best": int(ranks[order[0]]),
            "slowdown_of_the_predicted_best": took[int(np.argmin(values))] / min(took),
            "median_error": statistics.median(value / real - 1 for value, real in zip(values, took, strict=True)),
        }
    grids = [
        {
            "grid": measured[i].name,
            "seconds": measured[i].seconds,
            "median": took[i],
            **{how: float(values[i]) for how, values in predicted.items()},
            **{f"{how} rank": int(_ranks(values)[i]) for how, values in predicted.items()},
        }
        for i in order
    ]
    return {"settings": dict(settings), "judged": judged, "grids": grids}


def errors(
    grids: Sequence[str], measured: Sequence[Mapping[str, float]], predicted: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """Collectives' seconds as the ledger measured them and as predicted, and by which share the predictions miss.

    Args:
        grids: names.
        measured: seconds by axis, of each grid.
        predicted: likewise.
    """
    rows: list[dict[str, Any]] = [
        {"grid": grid, "axis": axis, "measured": took[axis], "predicted": said[axis]}
        for grid, took, said in zip(grids, measured, predicted, strict=True)
        for axis in took
    ]
    off = lambda one: one["predicted"] / one["measured"] - 1  # noqa: E731
    axes: list[str] = sorted({row["axis"] for row in rows})
    whole = [abs(sum(said.values()) / sum(took.values()) - 1) for took, said in zip(measured, predicted, strict=True)]
    return {
        "collectives": rows,
        "by_axis": {axis: statistics.median(off(row) for row in rows if row["axis"] == axis) for axis in axes},
        "collective_error": statistics.median(whole),
    }


def text(numbers: Mapping[str, Any]) -> str:
    """Grids, the measured fastest first, and what was predicted."""
    shown = lambda seconds: f"{1e3 * seconds:.1f}"  # noqa: E731
    columns: dict[str, Callable[[dict[str, Any]], object]] = {
        "grid": lambda one: one["grid"],
        "measured ms": lambda one: shown(one["median"]),
        "min-max": lambda one: extremes(one["seconds"], shown),
    }
    for way in numbers["judged"]:
        columns[way] = lambda one, way=way: shown(one[way])  # type: ignore[misc]
        columns[f"{way} rank"] = lambda one, way=way: one[f"{way} rank"]  # type: ignore[misc]
    lines = [table(columns, numbers["grids"])]
    for way, said in numbers["judged"].items():
        lines.append(
            f"{way}: Spearman {said['spearman']:.3f}; the measured best is number {said['place_of_the_measured_best']}; the predicted best "
            f"takes {said['slowdown_of_the_predicted_best']:.2f} of the measured best's time; error {said['median_error']:+.0%} in the median"
        )
    by_axis = ", ".join(f"{axis} {error:+.0%}" for axis, error in numbers["by_axis"].items())
    lines.append(
        f"collectives alone, by the ledger: a grid's sum is {numbers['collective_error']:.0%} off in the median; by axis {by_axis}"
    )
    return "\n".join(lines)


def pictures(numbers: Mapping[str, Any]) -> dict[str, Picture]:
    """Measured time by predicted rank, as Figure 5.2."""

    def draw(figure: Any) -> None:
        panels = figure.subplots(1, len(numbers["judged"]))
        for axes, (way, said) in zip(panels, numbers["judged"].items(), strict=True):
            grids = sorted(numbers["grids"], key=lambda one: one[f"{way} rank"])
            axes.bar(range(1, len(grids) + 1), [1e3 * one["median"] for one in grids])
            axes.set_xticks(range(1, len(grids) + 1), [one["grid"] for one in grids], rotation=90, fontsize="x-small")
            axes.set_title(f"{way}: Spearman {said['spearman']:.2f}")
            axes.set_xlabel("grids, the fastest predicted first")
            axes.set_ylabel("measured ms a step")

    return {"ranks.png": Picture(draw, (10, 4.5))}


def _ranks(values: Sequence[float]) -> np.ndarray:
    """From 1; equal values share the mean of theirs."""
    found = np.asarray(values, float)
    below = (found[None, :] < found[:, None]).sum(axis=1)
    return below + ((found[None, :] == found[:, None]).sum(axis=1) + 1) / 2
