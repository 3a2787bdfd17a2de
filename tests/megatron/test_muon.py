"""Megatron's Muon on grids: weights after ten steps are those of one rank's own, by a double of emerging_optimizers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("megatron.core.optimizer.muon", reason="this megatron-core has no Muon")

import torch

from axonn_plugins.hosts.megatron.settings import Settings
from tests.axonn_tp.families import in_float64
from tests.distributed import run_ranks
from tests.matrix import names
from tests.megatron import training
from tests.megatron.test_layers import LLAMA
from tests.megatron.training import Case

MUON = {"optimizer": "muon", "lr": 1e-2, "clip_grad": 0.0}  # Megatron clips in float32
WHOLE = Case(steps=10, dtype=torch.float64, batch=4, optimizer=MUON)
CASES = {
    "llama": replace(WHOLE, config=LLAMA.config, model=LLAMA.model),
    "gpt": replace(
        WHOLE, config={"add_qkv_bias": False}, optimizer={**MUON, "muon_split_qkv": False, "muon_use_nesterov": True}
    ),
}
GRIDS = [Settings(2, 2), Settings(2, 1, 2), Settings(1, 2, 2, layout="replicated"), Settings(1, 1, 4), Settings(4)]


def _trained(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    with in_float64():
        return training.train_all(cases)


@pytest.mark.parametrize("name", names(CASES, ["llama"]))
def test_weights_after_ten_steps_are_those_of_one_rank(name: str) -> None:
    stock = run_ranks(_trained, 1, {name: CASES[name]})[0][name]
    cases = {str(grid): CASES[name].on(grid, expected=stock["weights"]) for grid in GRIDS}
    for rank in run_ranks(_trained, 4, cases):
        for grid, found in rank.items():
            both = zip(found["losses"], stock["losses"], strict=True)
            assert max(abs(f - w) / w for f, w in both) < 1e-6, grid  # told in float32
            assert max(found["weights"].values()) < 1e-9, grid
