"""The Trainer in 16 bits, whose configuration leaves that to TrainingArguments: within the type's roundings of one process."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import pytest
import torch

import axonn_plugins
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks, same_on_all

axonn_plugins.activate()
pytest.importorskip("accelerate")
from tests.huggingface.trainer_runs import Case, history, llama, reported, trainer  # noqa: E402

GRIDS: dict[str, tuple[dict[str, Any], int]] = {"gx": ({"gx": 2, "plan": "auto"}, 1), "gz": ({"gz": 2}, 2)}


def case(kind: str) -> Case:
    arguments = {"num_train_epochs": 1, "eval_strategy": "epoch", "max_grad_norm": 0.5, kind: True}
    return Case(model=llama, batch=8, arguments=arguments, config={k: {"enabled": "auto"} for k in ("bf16", "fp16")})


def run(kind: str, block: dict[str, Any] | None, readers: int, first: bool = False) -> list[dict[str, float]]:
    """Train, or evaluate and then train: training begins with the weights as they are, not rounded for an evaluation."""
    # On a CPU the Trainer takes bf16 where it is told that it is on one.
    used = trainer(case(kind), block, readers, same_on_all(tempfile.mkdtemp()), use_cpu=True)
    before = [reported(used.evaluate())] if first else []
    if first:
        assert {p.dtype for p in used.model.parameters()} == {torch.float32}
    used.train()
    if block is not None:
        assert {str(p.dtype) for p in used.model.parameters()} == {
            "torch.bfloat16" if kind == "bf16" else "torch.float16"
        }
    return before + history(used)


def alone() -> dict[str, Any]:
    return {"theirs": run("bf16", None, 1, first=True), "ours": run("bf16", {"tensor_parallel": {}}, 1, first=True)}


def split() -> dict[str, Any]:
    found = {
        name: attempt(partial(run, "bf16", {"tensor_parallel": grid}, readers, first=True))
        for name, (grid, readers) in GRIDS.items()
    }
    return found | {"fp16": attempt(partial(run, "fp16", {"tensor_parallel": GRIDS["gx"][0]}, 1))}


def close(found: Any, wanted: list[dict[str, float]], rel: float) -> None:
    assert len(found) == len(wanted)
    for entry, other in zip(found, wanted, strict=True):
        for key in entry.keys() & other.keys() & {"loss", "eval_loss", "grad_norm", "eval_right", "epoch", "step"}:
            assert entry[key] == pytest.approx(other[key], rel=1e-1 if key == "grad_norm" else rel, abs=1e-2), key


def test_losses_are_those_of_one_process() -> None:
    wanted = run_ranks(alone, 1)[0]
    close(wanted["ours"], wanted["theirs"], 1e-2)
    for found in run_ranks(split, 2):
        for name in GRIDS:
            assert not isinstance(found[name], str), (name, found[name])
            close(found[name], wanted["ours"], 5e-3)
        if isinstance(found["fp16"], str):  # of a processor that DeepSpeed computes in no fp16 on
            assert "no fp16 on this device" in found["fp16"]
        else:
            close(found["fp16"], wanted["ours"][1:], 1e-2)
