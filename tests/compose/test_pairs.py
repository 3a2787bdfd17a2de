"""Every pair of systems at every stage of ZeRO, on two grids, trains what one process trains, in float64.

Every run has each pair once, at the stages and on the two grids in turn. At ZeRO-1 weights are gathered while the next forward pass runs.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from axonn_plugins.config.compose import SYSTEMS, pairs
from tests.compose.training import Case, run_all
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks
from tests.matrix import chosen, names

CLOSE = 1e-10
GRIDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "x": ({"gx": 2}, {"tensor": 2}),
    "y and z": ({"gy": 2, "gz": 2}, {}),
}
"""Sizes for `tensor_parallel`, and for `ted` alone."""
OTHERS: dict[str, dict[str, Any]] = {
    "samo": {"sparsity": 0.8},
    "offload_optimizer": {"bucket_size": 1024},
    "pccl": {"tune": False},
    "goldfish": {"k": 2, "h": 3},
}


OWNED = {"tensor_parallel", "ted", "samo", "offload_optimizer"}
"""With which the optimizer's states are ours."""


def case_of(systems: tuple[str, ...], grid: str, stage: int) -> Case:
    """Four ranks; where there is a pipeline, two of each stage."""
    block: dict[str, Any] = {key: OTHERS[key] for key in systems if key in OTHERS}
    stages, sizes = 2 * ("pipeline" in systems), dict(GRIDS[grid][0])
    if stages and len(sizes) > 1:
        sizes.pop("gy")
    if "tensor_parallel" in systems:
        block["tensor_parallel"] = {"plan": "auto", **sizes}
    experts = None
    if "ted" in systems:
        block["ted"] = {} if "tensor_parallel" in systems else GRIDS[grid][1]
        plane = (
            sizes.get("gx", 1) * sizes.get("gy", 1) if "tensor_parallel" in systems else block["ted"].get("tensor", 1)
        )
        experts = min(2, 4 // max(stages, 1) // plane)
    if stage == 1 and OWNED.intersection(systems):
        block["overlap_param_gather"] = True
    return Case(block, stage, experts, stages, tied=bool(stages), steps=3 if stage == 1 else 2)


CASES = {
    f"{first} and {second}, ZeRO-{stage}, {grid}": case_of((first, second), grid, stage)
    for first, second in combinations(SYSTEMS, 2)
    for stage in (0, 1, 2)
    for grid in GRIDS
    if stage < 2 or "pipeline" not in (first, second)
    if stage == 0 or second != "goldfish"  # which no stage's optimizer sees
    if grid == "x" or {first, second} & {"tensor_parallel", "ted"}  # which alone have one
}


def in_turn() -> set[str]:
    """Of each pair one case; of pairs that know as many stages each another."""
    found, turns = set(), {1: 0, 2: 0, 3: 0}
    for first, second in combinations(SYSTEMS, 2):
        stages = 1 if second == "goldfish" else 2 if "pipeline" in (first, second) else 3
        split = bool({first, second} & {"tensor_parallel", "ted"})
        grid = [*GRIDS][sum(turns.values()) % 2 if split else 0]
        found.add(f"{first} and {second}, ZeRO-{turns[stages] % stages}, {grid}")
        turns[stages] += 1
    return found


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Results of rank 0; pipelines have groups of their own, and pccl, which stays once it is there, comes last."""
    kinds: dict[bool, dict[str, Case]] = {}
    for name, case in sorted(chosen(request, CASES).items(), key=lambda item: "pccl" in item[1].block):
        kinds.setdefault(bool(case.stages), {})[name] = case
    results: dict[str, Any] = {}
    for cases in kinds.values():
        results |= run_ranks(run_all, 4, cases, attempt)[0]
    return results


@pytest.mark.parametrize("name", names(CASES, in_turn()))
def test_pair(found: dict[str, Any], name: str) -> None:
    assert not isinstance(found[name], str), found[name]
    losses, norms, wanted, wanted_norms = found[name]
    assert losses == pytest.approx(wanted, rel=CLOSE) and losses[-1] < losses[0]
    assert [norm for norm in norms if norm is not None] == pytest.approx(wanted_norms[: len(norms)], rel=CLOSE)


def test_the_table_has_every_pair_and_no_reason_is_a_delay() -> None:
    table = pairs()
    assert len(table) == len(SYSTEMS) * (len(SYSTEMS) - 1) // 2
    assert all(" yet" not in reason for *_, reasons in table for reason in reasons)
