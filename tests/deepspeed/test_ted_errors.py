"""Mistakes around ``axonn.ted``: one sentence on every rank, nothing left waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import TopKGate
from torch import nn

from tests.distributed import run_ranks


class Model(nn.Module):
    def __init__(self, ep_size: int = 2, other: int | None = None, **options: Any) -> None:
        super().__init__()
        self.first = MoE(8, nn.Linear(8, 8), 4, ep_size, **options)
        self.second = MoE(8, nn.Linear(8, 8), 4, ep_size if other is None else other)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)[0])[0].sum()


def parts(model: Model) -> None:
    for parameter in model.first.deepspeed_moe.experts.parameters():
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def own_gate(model: Model) -> None:
    class Gate(TopKGate):
        def forward(self, *inputs: Any, **keywords: Any) -> Any:
            return super().forward(*inputs, **keywords)

    model.second.deepspeed_moe.gate.__class__ = Gate


def made_for(ranks: int) -> Callable[[Model], None]:
    """Each rank's experts are those of its place among so many."""

    def change(model: Model) -> None:
        for parameter in model.second.deepspeed_moe.experts.parameters():
            parameter.data.fill_(float(dist.get_rank() % ranks))

    return change


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Model], None], bool, str]] = {
    "parts": ({"tensor": 2}, {}, parts, False, "layer first has experts that are split already"),
    "gate": ({}, {}, own_gate, False, "layer second.deepspeed_moe.gate has a forward of its own"),
    "other ranks": (
        {"tensor": 2},
        {},
        made_for(2),
        False,
        "weights are equal on ranks [0, 2], and TED has the same experts on [0, 1]",
    ),
    "said twice": (
        {"expert_tensor_parallel": False},
        {"enable_expert_tensor_parallelism": True},
        made_for(1),
        True,
        "expert_tensor_parallel = false, but layer first has enable_expert_tensor_parallelism = true",
    ),
    "said by one": (
        {},
        {"enable_expert_tensor_parallelism": True},
        made_for(1),
        True,
        "layer first has enable_expert_tensor_parallelism = true and layer second has false",
    ),
}
"""The block, the first layer's arguments, what is done to the model, whether there is an mpu, and what is said."""
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "tensor": ({"tensor": 3}, {}, {}, "axonn.ted.tensor = 3 does not divide the 4 ranks of this run"),
    "expert": ({"tensor": 2}, {"ep_size": 4}, {}, "ep_size = 4 of the MoE layers does not divide"),
    "two sizes": ({}, {"other": 4}, {}, "layer first has ep_size = 2 and layer second has ep_size = 4"),
    "ZeRO-3": ({}, {}, {"zero_optimization": {"stage": 3}}, "zero_optimization.stage = 3 does not go with axonn.ted"),
    "offload": (
        {"tensor": 2, "tile_size": None},
        {},
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
        "zero_optimization.offload_optimizer.device = nvme is beyond host memory",
    ),
    "optimizer": (
        {},
        {},
        {"optimizer": {"type": "ZeroOneAdam", "params": {}}},
        "optimizer.type = ZeroOneAdam communicates",
    ),
    "gradients": (
        {"tensor": 2},
        {},
        {"zero_optimization": {"stage": 1, "contiguous_gradients": False}},
        "zero_optimization.contiguous_gradients = false does not go with experts",
    ),
    "sums": (
        {},
        {},
        {"zero_optimization": {"stage": 2, "reduce_scatter": False}},
        "zero_optimization.reduce_scatter = false does not go with experts",
    ),
    "order": (
        {},
        {},
        {"use_data_before_expert_parallelism": True},
        "use_data_before_expert_parallelism = true has other ranks share an expert than axonn.ted",
    ),
    "another engine": (
        {},
        {},
        {"hybrid_engine": {"enabled": True}},
        "hybrid_engine has an engine of its own; remove it",
    ),
    "key": ({"tensors": 2}, {}, {}, "axonn.ted.tensors is not a key"),
    "value": ({"stash": "disk"}, {}, {}, 'axonn.ted.stash = "disk" is not known'),
}


class Unit:
    """Somebody's mpu, whose tensor ranks are no neighbours."""

    def __init__(self) -> None:
        rank = dist.get_rank()
        tensor = {first: dist.new_group([first, first + 2]) for first in (0, 1)}
        data = {first: dist.new_group([first, first + 1]) for first in (0, 2)}
        self.tensor, self.data = tensor[rank % 2], data[rank - rank % 2]

    def get_tensor_model_parallel_group(self) -> Any:
        return self.tensor

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_data_parallel_world_size(self) -> int:
        return 2


class Neighbours(Unit):
    """Tensor ranks are neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor, self.data = self.data, self.tensor


def start(
    ted: dict[str, Any],
    model: dict[str, Any],
    more: dict[str, Any],
    mpu: Any = None,
    change: Callable[[Model], None] = lambda model: None,
) -> str:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "axonn": {"ted": ted},
    }
    try:
        built = Model(**model)
        change(built)
        deepspeed.initialize(model=built, model_parameters=built.parameters(), config=config | more, mpu=mpu)
    except ValueError as error:
        return str(error)
    return "no error"


def everything() -> dict[str, str]:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a kernel that nothing here needs
    import axonn_plugins

    axonn_plugins.activate()
    found = {name: start(*case) for name, (*case, _) in CASES.items()}
    unit = Neighbours()
    for name, (ted, model, change, with_unit, _) in CHANGES.items():
        found[f"changed: {name}"] = start(ted, model, {}, unit if with_unit else None, change)
    found["mpu"] = start({}, {}, {}, Unit())
    found["mpu and tensor"] = start({"tensor": 2}, {}, {}, Unit())
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, str]]:
    return run_ranks(everything, 4)


@pytest.mark.parametrize("name", [*CASES, *(f"changed: {name}" for name in CHANGES), "mpu", "mpu and tensor"])
def test_one_sentence_on_every_rank(found: list[dict[str, str]], name: str) -> None:
    units = {"mpu": "tensor group in the mpu is", "mpu and tensor": "deepspeed.initialize was given an mpu"}
    changes = {f"changed: {name}": said for name, (*_, said) in CHANGES.items()}
    expected = (units | changes)[name] if name in units | changes else CASES[name][3]
    for rank in found:
        assert expected in rank[name]
        assert "\n" not in rank[name]
