"""The report of a run: the table, results.json of the largest model, every number in cells.json, and the two pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from axonn_plugins.observe.figures import Picture
from axonn_plugins.observe.files import put
from axonn_recipes.bench.output import aligned, publish
from axonn_recipes.memorization.plan import count
from axonn_recipes.memorization.settings import BUCKETS, LOSSES, SUFFIX, Settings

_COLORS = ("tab:gray", "tab:blue", "tab:orange", "tab:red")
Cells = dict[tuple[str, str], list[dict[str, Any]]]
"""The results of `train`, by model and loss: one for each seed."""


def write(cells: Cells, settings: Settings, seeds: Sequence[int], folder: Path) -> None:
    """Print the table, and write it, the numbers and the pictures into the run's folder.

    Args:
        cells: models from the smallest to the largest.
        settings: the run.
        seeds: in the order of the cells.
        folder: the run's.
    """
    largest = list(cells)[-1][0]
    means = {loss: {name: _mean(cells[largest, loss], "exact", name) for name in BUCKETS} for loss in LOSSES}
    every = [
        {"model": model, "loss": loss, "seed": seed, **one}
        for (model, loss), found in cells.items()
        for seed, one in zip(seeds, found, strict=True)
    ]
    put(folder / "cells.json", json.dumps(every, indent=1) + "\n")
    titles = {
        "exact": f"pages whose last {SUFFIX} tokens are written without a mistake",
        "accuracy": f"right tokens of the last {SUFFIX}",
    }
    pictures = {
        f"{what}.png": Picture(partial(_draw, cells, settings, what, title), (9, 4), 110)
        for what, title in titles.items()
    }
    publish(folder, means, text(cells, settings), pictures)


def text(cells: Cells, settings: Settings) -> str:
    """The table: of each share the mean over seeds, and the least and the most."""
    seen = dict(zip(BUCKETS, (0, *settings.epochs), strict=True))
    rows = [
        [
            "model",
            "loss",
            *(f"{name} ({epochs} epochs)" for name, epochs in seen.items()),
            "right tokens",
            "held out, nats",
            "s",
        ]
    ]
    for (model, loss), found in cells.items():
        start, end = (fmean(one["held_out"][at] for one in found) for at in (0, 1))
        rows.append(
            [
                f"{model}, {count(found[0]['parameters'])}",
                loss,
                *(_spread(found, "exact", name) for name in BUCKETS),
                _spread(found, "accuracy", "high"),
                f"{start:.2f} -> {end:.2f}",
                f"{fmean(one['seconds'] for one in found):.0f}",
            ]
        )
    what = f"exact match of the last {SUFFIX} tokens: mean over {len(found)} seeds (least-most); right tokens are of the bucket high"
    return f"{what}\n\n{aligned(rows)}"


def _mean(found: list[dict[str, Any]], what: str, name: str) -> float:
    return fmean(one[what][name] for one in found)


def _spread(found: list[dict[str, Any]], what: str, name: str) -> str:
    values = [one[what][name] for one in found]
    return f"{fmean(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def _draw(cells: Cells, settings: Settings, what: str, title: str, figure: Any) -> None:
    """In the form of Figures 10 and 11: a group of bars for each model, a bar for each bucket, standard beside goldfish."""
    models = list(dict.fromkeys(model for model, _ in cells))
    for axes, loss in zip(figure.subplots(1, 2, sharey=True), LOSSES, strict=True):
        for at, (name, epochs) in enumerate(zip(BUCKETS, (0, *settings.epochs), strict=True)):
            values = np.array([[one[what][name] for one in cells[model, loss]] for model in models])
            means = values.mean(1)
            places = np.arange(len(models)) + 0.2 * (at - 1.5)
            spread = np.stack([means - values.min(1), values.max(1) - means])
            axes.bar(places, means, 0.18, yerr=spread, capsize=2, color=_COLORS[at], label=f"{name}, {epochs} epochs")
        axes.set_xticks(range(len(models)), [count(cells[model, loss][0]["parameters"]) for model in models])
        axes.set(title=f"{loss} loss", xlabel="parameters", ylim=(0, 1.05))
        axes.grid(axis="y", alpha=0.3)
    figure.axes[0].set_ylabel(title, fontsize="small")
    figure.axes[1].legend(fontsize="small")
