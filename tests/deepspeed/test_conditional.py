"""Layers that ranks of z call or not, as their data says, under the engine: it neither hangs nor mixes weights."""

from __future__ import annotations

import copy
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

from tests.axonn_tp.test_conditional import Listed
from tests.distributed import run_ranks

CASES = [({"gx": 2, "gz": 2}, 1), ({"gx": 2, "gz": 2}, 2), ({"gz": 4}, 2), ({"gz": 2}, 0)]


def furthest() -> list[float]:
    """By case, the largest distance of a loss from one process's in four steps."""
    found = []
    for sizes, stage in CASES:
        torch.manual_seed(1)
        model = Listed()
        serial = copy.deepcopy(model)
        config: dict[str, Any] = {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "axonn": {"tensor_parallel": {**sizes, "plan": "auto"}},
        }
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        optimizer = torch.optim.SGD(serial.parameters(), lr=0.1)
        generator, far = torch.Generator().manual_seed(3), 0.0
        for _ in range(4):
            x = torch.randn(8, 3, 12, generator=generator)
            expected, loss = serial(x), engine(engine.mesh.shard_batch(x))
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
            engine.backward(loss)
            engine.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=engine.mesh.group("batch"))
            far = max(far, abs(mean.item() / engine.mesh.grid.batch - expected.item()))
        found.append(far)
        engine.destroy()
    return found


def test_losses_are_those_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for found in run_ranks(furthest, 4):
        assert len(found) == len(CASES) and max(found) < 1e-5, found
