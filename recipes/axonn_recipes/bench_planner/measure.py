"""The work of each rank: build the model on every grid, check that all learn alike, and time them in turns."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from axonn_plugins.observe.ledger import Ledger
from axonn_plugins.observe.progress import each
from axonn_recipes.bench.rounds import check_losses
from axonn_recipes.bench_tp import sides
from axonn_recipes.bench_tp.measure import TOLERANCE, Side, first_steps, prepare, take_turns
from axonn_recipes.bench_tp.settings import Settings, name
from axonn_tp import Grid, Mesh

OPTIONS: dict[str, object] = {"reshard_after_forward": True}
"""As the planner takes weights: let go after forward, and gathered again."""


ALONE: dict[str, object] = dict.fromkeys(("overlap_all_reduce", "overlap_reduce_scatter", "overlap_all_gather"), False)
"""Every collective is waited for at once."""


def measure(settings: Settings) -> list[Side]:
    """Time every grid; every rank calls it, and has the result.

    Raises:
        ConfigError: grids do not compute the same losses.
    """
    prepare(settings)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    chosen = [Side(name(grid), "ours", _build(settings, grid)) for grid in settings.grids]
    steps = {side.name: first_steps(side) for side in chosen}
    check_losses(chosen, TOLERANCE)
    take_turns(chosen, steps, settings.rounds)
    for side in chosen:
        del side.build  # it cannot be sent to the process that started the ranks
    return chosen


def collectives(settings: Settings) -> list[dict[str, float]]:
    """Seconds of a step's collectives by axis for every grid, each waited for at once, as the ledger has them; every rank calls it.

    Of each collective, those of the rank that waits least for others to begin; what is under way together counts once.
    """
    prepare(settings)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return [_collectives(settings, grid) for grid in each(settings.grids, "collectives alone", "grid")]


def _collectives(settings: Settings, grid: Grid) -> dict[str, float]:
    mesh = Mesh(grid, sides.device().type)
    step = sides.ours(settings, grid, OPTIONS | ALONE, mesh)
    for _ in range(2):
        dist.barrier()
        with Ledger(mesh.axis_names()) as ledger:
            step()
    took = torch.tensor(in_turn([(entry.started, entry.ended) for entry in ledger.entries]), dtype=torch.float64)
    took = took.to(sides.device())
    dist.all_reduce(took, dist.ReduceOp.MIN)
    found: dict[str, float] = defaultdict(float)
    for entry, seconds in zip(ledger.entries, took.tolist(), strict=True):
        found[entry.collective.axis] += seconds
    return dict(found)


def in_turn(spans: Sequence[tuple[float, float]]) -> list[float]:
    """The part of every span that begins when all those before it have ended."""
    parts, last = [], -math.inf
    for started, ended in spans:
        parts.append(max(ended - max(started, last), 0.0))
        last = max(last, ended)
    return parts


def _build(settings: Settings, grid: Grid) -> Callable[[], sides.Step]:
    return lambda: sides.ours(settings, grid, OPTIONS)
