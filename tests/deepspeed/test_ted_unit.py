"""TED in a script that gives DeepSpeed an mpu: on the mpu's groups, by stock DeepSpeed's engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch.distributed as dist

from axonn_plugins.config import ConfigError, parse
from axonn_plugins.hosts.deepspeed.states_config import check
from axonn_plugins.hosts.deepspeed.ted.unit import refuse_whole
from tests.deepspeed.ted_training import STEPS, Case, serial_run, start, train
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks
from tests.matrix import chosen, names


class Unit:
    """Megatron's order of ranks: the tensor ones are neighbours."""

    def __init__(self, tensor: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        across = [dist.new_group(list(range(first, first + tensor))) for first in range(0, world, tensor)]
        along = [dist.new_group(list(range(first, world, tensor))) for first in range(tensor)]
        self.tensor, self.data = across[rank // tensor], along[rank % tensor]

    def get_model_parallel_rank(self) -> int:
        return self.tensor.rank()

    def get_model_parallel_world_size(self) -> int:
        return self.tensor.size()

    def get_model_parallel_group(self) -> Any:
        return self.tensor

    def get_data_parallel_rank(self) -> int:
        return self.data.rank()

    def get_data_parallel_world_size(self) -> int:
        return self.data.size()

    def get_data_parallel_group(self) -> Any:
        return self.data

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group


# Stock DeepSpeed's norm is not that of all experts, so nothing is clipped.
WHOLE = {"expert_tensor_parallel": False}
CASES = {
    "ZeRO-0": (2, Case({}, 2, clip=0.0)),
    "ZeRO-1, checkpointed": (2, Case({}, 4, stage=1, checkpoint="deepspeed", clip=0.0)),
    "ZeRO-2, bf16": (2, Case({}, 2, stage=2, dtype="bf16", clip=0.0)),
    "tensor 4": (4, Case({}, 2, stage=1, clip=0.0)),
    "whole experts": (2, Case(WHOLE, 4, stage=1, clip=0.0)),
    "resumed": (2, Case({}, 2, stage=1, checkpoint="deepspeed", clip=0.0)),
}
OF_EIGHT = {"ZeRO-1, checkpointed", "tensor 4"}
"""The others have four ranks, and are in every run."""


def run(tensor: int, case: Case, folder: str) -> Any:
    engine = start(case, mpu=Unit(tensor))
    kind = type(engine).__name__
    if not folder:
        found = train(engine, case)[0]
    else:
        found = train(engine, case, slice(0, 1))[0]
        engine.save_checkpoint(folder)
        engine.destroy()
        engine = start(replace(case, seed=9), mpu=Unit(tensor))
        engine.load_checkpoint(folder)
        found += train(engine, case, slice(1, None))[0]
    engine.destroy()
    deepspeed.utils.groups.mpu = None
    return kind, found


def all_cases(cases: dict[str, tuple[int, Case]], folder: str) -> Any:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a kernel that nothing here needs
    return {name: attempt(run, *case, str(Path(folder)) if name == "resumed" else "") for name, case in cases.items()}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    asked_for, results = chosen(request, CASES), {}
    for ranks in (4, 8):
        cases = {name: case for name, case in asked_for.items() if (name in OF_EIGHT) == (ranks == 8)}
        if cases:
            results |= run_ranks(all_cases, ranks, cases, str(tmp_path_factory.mktemp("checkpoint")))[0]
    return results


@pytest.mark.parametrize("name", names(CASES, CASES.keys() - OF_EIGHT))
def test_trains_what_one_process_trains(found: Any, name: str) -> None:
    assert not isinstance(found[name], str), found[name]
    kind, losses = found[name]
    tensor, case = CASES[name]
    assert kind == "TedUnitEngine"
    expected, _ = serial_run(case, [(8 if name in OF_EIGHT else 4) // tensor] * STEPS)
    assert losses == pytest.approx(expected, rel=1e-2 if case.dtype == "bf16" else 1e-6)


def test_an_optimizer_of_whole_matrices_is_refused_where_the_unit_splits_them() -> None:
    with pytest.raises(ValueError, match="optimizer.type = Muon looks at whole matrices, and the mpu's 2 tensor ranks"):
        refuse_whole("Muon", 2)
    refuse_whole("Muon", 1)
    refuse_whole("AdamW", 2)


def test_fp16_without_zero_is_refused_as_stock_steps_by_gradients_that_are_too_small(monkeypatch: Any) -> None:
    block, mpu = parse({"ted": {}}), object()
    monkeypatch.setattr(deepspeed, "__version__", "0.18.3")
    with pytest.raises(
        ConfigError, match="fp16.enabled = true at zero_optimization.stage = 0: DeepSpeed 0.18.3 divides"
    ):
        check(block, {"fp16": {"enabled": True}}, mpu)
    check(block, {"fp16": {"enabled": True, "loss_scale": 1}}, mpu)
    check(block, {"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}, mpu)
    monkeypatch.setattr(deepspeed, "__version__", "0.18.2")
    check(block, {"fp16": {"enabled": True}}, mpu)
