"""A stock DeepSpeed-MoE script under ``axonn.ted`` trains what one process with all experts trains."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.deepspeed.ted_training import TOLERANCE, Case, serial_run, start, train
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks
from tests.matrix import chosen, names

STEPS = 2
"""The second sees what the first has made."""


def run(case: Case) -> Any:
    engine = start(case)
    found = train(engine, case, slice(STEPS))
    kind = type(engine).__name__
    engine.destroy()
    return kind, found


TOPOLOGIES: dict[str, tuple[dict[str, Any], int]] = {
    "tensor 2, expert 2": ({"tensor": 2}, 2),
    "tensor 4, expert 2": ({"tensor": 4}, 2),
    "tensor 1, expert 4": ({}, 4),
}
STAGES = {"fp32": (0, "fp32"), "ZeRO-1": (1, "fp32"), "ZeRO-2, bf16": (2, "bf16")}
MATRIX = {
    f"{topology}, {kind}": Case(ted, ep_size, stage, dtype)
    for (topology, (ted, ep_size)), (kind, (stage, dtype)) in itertools.product(TOPOLOGIES.items(), STAGES.items())
}
OTHERS = {
    "tensor 2, expert 4, k 1, float64": Case({"tensor": 2}, 4, dtype="fp64", k=1),
    "tensor 8": Case({"tensor": 8}, 1, stage=1, k=4),
    "tensor 1, expert 1": Case({}, 1, stage=2),
    "whole experts": Case({"tensor": 2, "expert_tensor_parallel": False}, 2, stage=1, residual=True),
    "whole experts, expert 4": Case({"tensor": 2, "expert_tensor_parallel": False}, 4),
    "plain": Case({"tensor": 2, "duplicate_token_dropping": False, "fused": False, "overlap_degree": 2}, 2, stage=2),
    "bf16 without ZeRO": Case({"tensor": 2}, 2, dtype="bf16"),
    "fp16": Case({"tensor": 2}, 2, stage=1, dtype="fp16"),
    "reentrant": Case({"tensor": 2}, 2, checkpoint="reentrant"),
    "not reentrant": Case({"tensor": 2}, 2, stage=1, checkpoint="torch"),
    "DeepSpeed's checkpoint": Case({"tensor": 2, "stash": "cpu"}, 2, checkpoint="deepspeed"),
}


CASES = MATRIX | OTHERS
EVERY_RUN = {
    "tensor 2, expert 2, ZeRO-1",
    "tensor 1, expert 4, ZeRO-2, bf16",
    "whole experts",
    "plain",
    "fp16",
    "not reentrant",
    "DeepSpeed's checkpoint",
}
assert EVERY_RUN <= CASES.keys()


FOUR_RANKS = {name for name in CASES if name.startswith("tensor 1, expert 4")} | {
    "plain",
    "whole experts",
    "bf16 without ZeRO",
    "fp16",
    "reentrant",
    "not reentrant",
    "DeepSpeed's checkpoint",
}
"""Cases whose layout is not their point, or fits; the others have eight, on which copies of experts are averaged."""


def run_cases(cases: dict[str, Case]) -> Any:
    return {name: attempt(run, case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Any:
    cases = chosen(request, CASES)
    few = {name: case for name, case in cases.items() if name in FOUR_RANKS}
    many = {name: case for name, case in cases.items() if name not in FOUR_RANKS}
    return run_ranks(run_cases, 4, few)[0] | run_ranks(run_cases, 8, many)[0]


@pytest.mark.parametrize("name", names(CASES, EVERY_RUN))
def test_trains_what_one_process_trains(found: Any, name: str) -> None:
    case = CASES[name]
    assert not isinstance(found[name], str), found[name]
    kind, (losses, norms) = found[name]
    assert kind == "TedEngine"
    expected, expected_norms = serial_run(case, [(4 if name in FOUR_RANKS else 8) // case.tensor] * STEPS)
    assert losses == pytest.approx(expected, rel=TOLERANCE[case.dtype])
    assert norms == pytest.approx(expected_norms, rel=10 * TOLERANCE[case.dtype])
