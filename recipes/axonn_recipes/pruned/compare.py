"""The two sides of a recipe one after another, and what is said of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from axonn_plugins.cluster.launch import launch
from axonn_recipes.options import add_run
from axonn_recipes.pruned import report
from axonn_recipes.pruned.plan import Plan
from axonn_recipes.pruned.train import Problem, train

_SIDES = {"both": ("dense", "pruned"), "dense": ("dense",), "pruned": ("pruned",)}


def add_sides(parser: argparse.ArgumentParser, recipe: str) -> None:
    """``--side``, and what every run has."""
    parser.add_argument("--side", choices=_SIDES, default="both", help="(default both)")
    add_run(parser, recipe, "say what would be run and what it needs, and stop")


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
