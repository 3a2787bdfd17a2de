"""The HF Trainer with a mixture of experts under ``axonn.ted``: losses, predictions and saved files are one process's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import axonn_plugins
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks

axonn_plugins.activate()
pytest.importorskip("accelerate")
from tests.axonn_tp.families import GROUPED, hf  # noqa: E402
from tests.huggingface.trainer_runs import WORDS, Case, trained  # noqa: E402

BLOCKS: dict[str, tuple[dict[str, Any], int]] = {
    "expert": ({"ted": {"expert": 2}}, 2),
    "auto": ({"ted": {"expert": "auto"}}, 2),
    "tensor": ({"ted": {"tensor": 2}}, 1),
}


def mixture() -> nn.Module:
    torch.manual_seed(0)
    return hf(
        "Qwen3MoeForCausalLM", **{**GROUPED, "vocab_size": WORDS, "head_dim": 8}, num_experts=4, num_experts_per_tok=2
    )


CASE = Case(
    model=mixture,
    config={"zero_optimization": {"stage": 1}},
    arguments={"max_steps": 3, "gradient_checkpointing": True, "max_grad_norm": 0.5},
)


def every(blocks: dict[str, Any] | None) -> dict[str, Any]:
    return {
        name: attempt(partial(trained, CASE, block, readers))
        for name, (block, readers) in (blocks or {"one": (None, 1)}).items()
    }


def test_as_in_one_process() -> None:
    expected = run_ranks(every, 1, None)[0]["one"]
    for rank in run_ranks(every, 2, BLOCKS):
        for name, found in rank.items():
            assert not isinstance(found, str) and not isinstance(expected, str), (name, found, expected)
            for entry, other in zip(found["history"], expected["history"], strict=True):
                assert entry == pytest.approx(other, rel=1e-5, abs=1e-6), name
            assert found["steps"] == expected["steps"] and found["metrics"] == pytest.approx(
                expected["metrics"], rel=1e-5
            )
            torch.testing.assert_close(
                torch.tensor(found["logits"]), torch.tensor(expected["logits"]), rtol=0, atol=5e-5
            )
