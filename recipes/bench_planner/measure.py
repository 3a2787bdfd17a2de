"""What each rank does: build the model on every grid, check that all learn alike, and time them in turns."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from axonn_tp import Grid
from recipes.bench_tp import sides
from recipes.bench_tp.measure import Side, check_losses, first_steps, prepare, take_turns
from recipes.bench_tp.settings import Settings, name

OPTIONS: dict[str, object] = {"reshard_after_forward": True}
"""As the planner takes weights: let go after forward, and gathered again."""


def measure(settings: Settings) -> list[Side]:
    """Time every grid; every rank calls it, and has the result.

    Raises:
        ConfigError: grids do not compute the same losses.
    """
    prepare()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    chosen = [Side(name(grid), "ours", _build(settings, grid)) for grid in settings.grids]
    steps = {side.name: first_steps(side) for side in chosen}
    check_losses(chosen)
    take_turns(chosen, steps, settings.rounds)
    for side in chosen:
        del side.build  # it cannot be sent to the process that started the ranks
    return chosen


def _build(settings: Settings, grid: Grid) -> Callable[[], sides.Step]:
    return lambda: sides.ours(settings, grid, OPTIONS)
