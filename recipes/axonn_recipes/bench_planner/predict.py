"""The planner's predictions for the grids that are measured, on the machine as measured."""

from __future__ import annotations

import numpy as np
import torch

from axonn_plugins.planner import fourd
from axonn_plugins.planner.axonn import Floats, Grids
from axonn_plugins.planner.choose import Candidate, candidate, seconds, seconds_by_axis
from axonn_plugins.planner.machine import Machine, calibrated
from axonn_plugins.planner.model import Transformer
from axonn_plugins.planner.setting import Setting
from axonn_plugins.planner.step import Times
from axonn_recipes.bench_planner.measure import OPTIONS
from axonn_recipes.bench_tp.settings import Settings
from axonn_recipes.models.gpt import GPT
from axonn_tp import AXES, Grid, Options, place
from axonn_tp.plan.volumes import step_volumes


def formulas(machine: Machine, settings: Settings) -> Floats:
    """Seconds a step as `axonn plan --strategy axonn` has them by default."""
    return _times(machine, settings).total


def counted(machine: Machine, settings: Settings) -> Floats:
    """Seconds a step with what a rank sends counted over all layers, as sizes that are "auto" are chosen, and none of it hidden."""
    timed = _times(machine, settings)
    return timed.compute + timed.memory + seconds(machine, [_candidate(settings, grid) for grid in settings.grids])


def collectives(machine: Machine, settings: Settings) -> list[dict[str, float]]:
    """Seconds of a step's collectives by axis, for every grid."""
    by_axis = seconds_by_axis(machine, [_candidate(settings, grid) for grid in settings.grids])
    return [{axis: float(values[i]) for axis, values in by_axis.items()} for i in range(len(settings.grids))]


def _times(machine: Machine, settings: Settings) -> Times:
    at = _grids(settings)
    on, run = calibrated(machine, "calibrated"), Setting(float32=True)
    return fourd.times(on, _model(settings), at, np.ones(len(at)), settings.batch, "calibrated", run)[0]


def _candidate(settings: Settings, grid: Grid) -> Candidate:
    with torch.device("meta"):
        model = GPT(settings.model)
    placements = place(model, grid, settings.trained.plan(settings), Options(**OPTIONS))  # type: ignore[arg-type]
    return candidate(grid, step_volumes(model, placements, grid, settings.tokens // grid.batch), 0.0)


def _grids(settings: Settings) -> Grids:
    return Grids(*(np.array([grid.size(axis) for grid in settings.grids], np.int64) for axis in AXES))


def _model(settings: Settings) -> Transformer:
    return Transformer(
        "gpt", settings.layers, settings.hidden, settings.heads, settings.context, vocabulary=settings.model.vocabulary
    )
