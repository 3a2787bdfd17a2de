"""Pictures as Figures 1 to 4 of 004: configurations and memory above, shares of time and seconds below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axonn_plugins.config.base import ConfigError
from axonn_plugins.observe.figures import Picture
from axonn_plugins.planner.answer import Answer
from axonn_plugins.planner.report import GB, PARTS, shares
from axonn_plugins.planner.search import AnyPlan


def draw(path: Path, answers: Sequence[Answer]) -> list[Path]:
    """Draw the best configurations of one answer, or the best of each of several over numbers of GPUs.

    Args:
        path: where the picture goes; its suffix says which kind it is.
        answers: to one question, or to one for each number of GPUs.

    Returns:
        The path, or nothing where matplotlib is missing.

    Raises:
        ConfigError: nothing fits, so there is nothing to draw, or the suffix is of no kind of picture.
    """
    if len(answers) == 1:
        labels, plans = [f"{rank}" for rank, _ in enumerate(answers[0].best, 1)], answers[0].best
    else:
        fitting = [asked for asked in answers if asked.best]
        labels, plans = [str(asked.question.gpus) for asked in fitting], [asked.best[0] for asked in fitting]
    if not plans:
        raise ConfigError(f'--plot = "{path}" would be empty, as nothing fits; ask for more GPUs or another strategy')
    title = f"{answers[0].question.model.name} on {answers[0].question.machine.name}"
    axis = "GPUs" if len(answers) > 1 else "configuration"
    return of(title, axis, labels, plans).save(path, "--plot")


def of(title: str, axis: str, labels: Sequence[str], plans: Sequence[AnyPlan]) -> Picture:
    """Plans beside one another.

    Args:
        title: above them.
        axis: what the labels are.
        labels: one for each plan.
        plans: which.
    """

    def draw(figure: Any) -> None:
        above, below = figure.subplots(2, 1, sharex=True)
        _configurations(above, plans)
        _shares(below, plans)
        above.set_title(title)
        below.set_xticks(range(len(plans)), labels)
        below.set_xlabel(axis)

    return Picture(draw, (max(6.0, 1.1 * len(plans) + 2), 7.0))


def _configurations(axes, plans: Sequence[AnyPlan]) -> None:
    sizes = [{**plan.sizes, "m": plan.microbatches} for plan in plans]
    names = list(dict.fromkeys(name for one in sizes for name in one if name != "nb"))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        places = [x + width * (number - (len(names) - 1) / 2) for x in range(len(plans))]
        axes.bar(places, [one.get(name, 0) for one in sizes], 0.94 * width, label=name)
    axes.set_yscale("log", base=2)
    axes.set_ylabel("size")
    memory = axes.twinx()
    memory.plot([plan.bytes / GB for plan in plans], "ko", label="memory")
    memory.set_ylim(bottom=0)
    memory.set_ylabel("GB a GPU")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.06), ncols=8, fontsize="small", frameon=False)


def _shares(axes, plans: Sequence[AnyPlan]) -> None:
    bottom = [0.0] * len(plans)
    for part, name in PARTS.items():
        parts = [100 * shares(plan)[part] for plan in plans]
        axes.bar(range(len(plans)), parts, 0.6, bottom=bottom, label=name)
        bottom = [low + share for low, share in zip(bottom, parts, strict=True)]
    axes.set_ylabel("% of a step")
    axes.set_ylim(0, 100)
    seconds = axes.twinx()
    seconds.plot([plan.seconds for plan in plans], "ko", label="step")
    if max(plan.seconds for plan in plans) > 5 * min(plan.seconds for plan in plans):
        seconds.set_yscale("log")
    else:
        seconds.set_ylim(bottom=0)
    seconds.set_ylabel("s a step")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6, fontsize="small", frameon=False)
