"""Sequences that ranks of z share beside every other system, in float64: what one process trains."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compose.training import Case, run_all
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks
from tests.matrix import chosen, names

CLOSE = 1e-10
SAMO, GOLDFISH, OFFLOAD = {"sparsity": 0.8}, {"k": 2, "h": 3}, {"bucket_size": 1024}


def shared(batch: int = 1, sequence: int = 2, **more: Any) -> dict[str, Any]:
    return {"plan": "auto", "gz": {"batch": batch, "sequence": sequence}, **more}


CASES = {
    "samo": Case({"tensor_parallel": shared(1, 4), "samo": SAMO}, 1),
    "goldfish, samo, offloaded": Case(
        {"tensor_parallel": shared(2), "goldfish": GOLDFISH, "samo": SAMO, "offload_optimizer": OFFLOAD}, 2
    ),
    "experts over shares": Case({"tensor_parallel": shared(1, 4), "ted": {}}, 1, 4),
    "experts over readers and shares, pccl": Case(
        {"tensor_parallel": shared(2), "ted": {"dropless": True}, "pccl": {"tune": False}}, 0, 4
    ),
    "experts split and over shares": Case({"tensor_parallel": shared(gx=2), "ted": {}, "goldfish": GOLDFISH}, 0, 2),
}
STAGED = {
    "stages": Case({"tensor_parallel": shared()}, 1, None, 2, True),
    "stages of one layer, recomputed": Case(
        {"tensor_parallel": shared(), "pipeline": {"activation_checkpointing": 1}, "goldfish": GOLDFISH}, 0, None, 2
    ),
    "stages, experts, samo": Case({"tensor_parallel": shared(), "ted": {}, "samo": SAMO}, 0, 2, 2, True),
}


EVERY_RUN = {
    "goldfish, samo, offloaded",
    "experts over readers and shares, pccl",
    "experts split and over shares",
    "stages, experts, samo",
}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Results of rank 0; pccl, which stays once it is there, comes last."""
    results: dict[str, Any] = {}
    for cases in (dict(sorted(CASES.items(), key=lambda item: "pccl" in item[1].block)), STAGED):
        if wanted := chosen(request, cases):
            results |= run_ranks(run_all, 4, wanted, attempt)[0]
    return results


@pytest.mark.parametrize("name", names([*CASES, *STAGED], EVERY_RUN))
def test_beside_others(found: dict[str, Any], name: str) -> None:
    assert not isinstance(found[name], str), found[name]
    losses, norms, wanted, wanted_norms = found[name]
    assert losses == pytest.approx(wanted, rel=CLOSE) and losses[-1] < losses[0]
    # Gates are in float32, in which the last bit of a float64 may turn another.
    close = CLOSE if "experts" not in name else 1e-8
    assert [norm for norm in norms if norm is not None] == pytest.approx(wanted_norms[: len(norms)], rel=close)
