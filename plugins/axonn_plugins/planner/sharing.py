"""The way of attention by which a plan is timed whose ranks share samples, for those that run it."""

from __future__ import annotations

import numpy as np

from axonn_plugins.planner.answer import Question
from axonn_plugins.planner.axonn import Grids
from axonn_plugins.planner.context import Way, way_of
from axonn_plugins.planner.machine import calibrated
from axonn_plugins.planner.rates import in_precision
from axonn_plugins.planner.split import Split


def way(question: Question, split: Split) -> Way:
    """The way between ranks of a grid that share samples.

    Args:
        question: what was asked.
        split: the grid, with several such ranks.
    """
    of = next(one.attention for one in question.model.blocks if one.attention is not None)
    sizes = (split.gx, split.gy, split.gz, split.gdata, split.stages, split.sequence)
    at = Grids(*(np.array([size]) for size in sizes))
    machine = in_precision(calibrated(question.machine, question.mode), question.setting)
    return way_of(machine, of, at, split.microbatch / split.sequence * np.ones(1))
