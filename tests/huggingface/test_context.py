"""The Trainer on sequences that ranks of z share: its losses, evaluations, guesses and files are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

import axonn_plugins
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks

axonn_plugins.activate()
pytest.importorskip("accelerate")
from tests.huggingface.trainer_runs import Case, gpt2, llama, trained  # noqa: E402

CASES = {
    "recomputed": (
        Case(llama, batch=8, samples=14, arguments={"max_steps": 2, "gradient_checkpointing": True, "eval_strategy": "epoch", "neftune_noise_alpha": 5.0}),
        {"gz": {"sequence": 2}},
        2,
    ),
    "smoothed": (
        Case(gpt2, batch=8, samples=14, arguments={"max_steps": 2, "label_smoothing_factor": 0.1}, config={"zero_optimization": {"stage": 1}}),
        {"gz": {"batch": 2, "sequence": 2}},
        2,
    ),
}  # fmt: skip


def runs() -> dict[str, Any]:
    return {
        name: attempt(trained, case, {"tensor_parallel": block}, readers)
        for name, (case, block, readers) in CASES.items()
    }


def alone() -> dict[str, Any]:
    return {name: trained(case, None, 1) for name, (case, _, _) in CASES.items()}


def test_as_one_process() -> None:
    (expected,) = run_ranks(alone, 1)
    found = run_ranks(runs, 4)
    for name in CASES:
        for rank in found:
            assert isinstance(rank[name], dict), rank[name]
            for got, wanted in zip(rank[name]["history"], expected[name]["history"], strict=True):
                assert got == pytest.approx(wanted, rel=1e-5, abs=1e-6), name
            assert rank[name]["metrics"] == pytest.approx(expected[name]["metrics"], rel=1e-5, abs=1e-6)
            got, wanted = (sum(sum(run[name]["logits"], []), []) for run in (rank, expected))
            assert got == pytest.approx(wanted, rel=1e-4, abs=1e-4)
