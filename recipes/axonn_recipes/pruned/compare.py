"""The two sides of a recipe one after another, and what is said of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from axonn_plugins.cluster.launch import launch
from axonn_recipes.options import Run
from axonn_recipes.pruned import report
from axonn_recipes.pruned.plan import Plan
from axonn_recipes.pruned.train import Problem, train

_SIDES = {"both": ("dense", "pruned"), "dense": ("dense",), "pruned": ("pruned",)}


@dataclass(frozen=True, kw_only=True)
class Sides(Run):
    """Options of a recipe with both sides.

    Attributes:
        side: one alone, or both.
    """

    side: Literal["both", "dense", "pruned"] = "both"


def compare(problem: Problem, plan: Plan, side: str, folder: Path) -> int:
    """Train the sides on `plan.ranks` ranks, print the table and write it; returns the exit code.

    Args:
        problem: model and data.
        plan: the run.
        side: both, dense or pruned.
        folder: the run's.
    """
    outcomes = {
        name: launch(train, plan.ranks, problem, plan, name == "pruned", folder / name)[0] for name in _SIDES[side]
    }
    report.publish(report.results(problem, plan, outcomes), folder)
    return 0
