"""A model with MoE layers on any mesh trains what one process with all experts trains, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from axonn_tp import Grid, Mesh, Options, factorisations
from tests import groups
from tests.compose.experts_on_mesh import GATES, PLAIN, REENTRANT, Case, errors, expected
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks

TOLERANCE = 1e-10
WHOLE = {"expert_tensor_parallel": False}
REPLICATED = Options(layout="replicated")


def sizes_of(grid: Grid, whole: bool) -> Iterator[int]:
    plane = grid.gx * grid.gy
    for size in (1, 2, 4):
        if whole:
            if grid.world % size == 0 and max(size, plane) % min(size, plane) == 0:
                yield size
        elif grid.batch % size == 0:
            yield size


def cases_of(grid: Grid) -> Iterator[Case]:
    """Both layouts with every ep_size, experts split and whole; gates, plans and the rest take turns."""
    number = 0
    for options in (Options(), REPLICATED):
        for ted in ({}, WHOLE):
            for size in sizes_of(grid, ted is WHOLE):
                gate = list(GATES)[number % len(GATES)]
                yield Case(grid, size, gate, ("stream", "stream", "pairs")[number % 3], options, ted)
                number += 1


def cases(ranks: int) -> list[Case]:
    if ranks == 4:
        return [case for grid in factorisations(4) for case in cases_of(grid)]
    everything = Options(reshard_after_forward=True, regather_inputs=True)
    return [
        Case(Grid(2, 2, 2), 2, "k 1"),
        Case(Grid(2, 2, 2), 2, "k 2, drops, residual", options=everything),
        Case(Grid(2, 1, 2, 2), 4, "k 2", options=everything, checkpoint=REENTRANT),
        Case(Grid(1, 2, 2, 2), 2, "k 1, drops", options=REPLICATED, checkpoint=PLAIN),
        Case(Grid(2, 2, 1, 2), 2, "k 2", checkpoint=PLAIN),
        Case(Grid(4, 1, 1, 2), 2, "k 2, drops, residual"),
        Case(Grid(2, 1, 4), 2, "k 2", ted=WHOLE),
        Case(Grid(2, 2, 2), 4, "k 1, drops", ted=WHOLE, checkpoint=REENTRANT),
        Case(Grid(2, 2, 2), 2, "k 2", ted={"duplicate_token_dropping": False, "fused": False}),
        Case(Grid(2, 2, 2), 2, "k 2", plan="auto"),
        Case(Grid(2, 1, 2, 2), 4, "k 1", plan="auto", options=REPLICATED),
    ]


def all_errors(chosen: list[Case]) -> Any:
    groups.reuse()
    made = {grid: Mesh(grid) for grid in dict.fromkeys(case.grid for case in chosen)}
    return {str(case): attempt(errors, case, made[case.grid]) for case in chosen}


@pytest.mark.parametrize("ranks", [4, 8])
def test_equals_one_process(ranks: int) -> None:
    chosen = cases(ranks)
    for case in chosen:
        expected(case.gate, case.grid.batch)
    for found in run_ranks(all_errors, ranks, chosen, timeout=400):
        for case, differences in found.items():
            assert not isinstance(differences, str), (case, differences)
            assert max(differences.values()) < TOLERANCE, (case, differences)
