"""TED on an mpu whose script has split the experts itself, or deals whole ones over the tensor ranks: nothing is overwritten."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from torch import nn

from ted_moe import Topology
from tests.deepspeed.ted_unit_scripts import (
    HIDDEN,
    INNER,
    STEPS,
    TENSOR,
    Script,
    Unit,
    gradients,
    serial_losses,
    start,
    train,
)
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks
from tests.matrix import asked, names, thorough

WHOLE: dict[str, Any] = {"parts": False, "marked": False, "said": False, "apart": True}
SCRIPTS = {
    "parts": Script({}, 2),
    "parts, expert 1": Script({}, 1, residual=True),
    "parts without marks": Script({}, 2, marked=False, residual=True),
    "marks alone say it": Script({"expert_tensor_parallel": True}, 2, said=False),
    "weights alone say it": Script({"expert_tensor_parallel": True}, 2, said=False, marked=False),
    "all tokens sent": Script({"duplicate_token_dropping": False}, 2, k=1),
    "whole": Script({}, 2, **WHOLE),
    "whole, expert 4": Script({}, 4, **WHOLE, residual=True),
    "whole, as the block says": Script({"expert_tensor_parallel": False}, 2, **WHOLE),
    "whole, for tensor ranks to split": Script({"expert_tensor_parallel": None}, 2, **{**WHOLE, "apart": False}),
}
TRAINED = {
    "parts, ZeRO-0": Script({}, 2),
    "parts, ZeRO-1, resumed": Script({}, 2, config={"zero_optimization": {"stage": 1}}),
    "parts, ZeRO-2": Script({}, 1, residual=True, config={"zero_optimization": {"stage": 2}}),
    "whole, ZeRO-1": Script({}, 4, **WHOLE, config={"zero_optimization": {"stage": 1}}),
}


CONFIGURATIONS = list(itertools.product((1, 2), (2,), (True, False), (True, False)))
CONFIGURATIONS += [(1, 4, True, True), (1, 4, False, False)]
"""ep_size, tensor ranks, enable_expert_tensor_parallelism, use_residual."""
EVERY_RUN = {
    "parts, expert 1",
    "weights alone say it",
    "all tokens sent",
    "whole, expert 4",
    "whole, for tensor ranks to split",
    "parts, ZeRO-1, resumed",
    "whole, ZeRO-1",
    (2, 2, True, False),
    (1, 2, False, True),
    (1, 4, True, True),
}
"""Names of SCRIPTS and TRAINED, and configurations."""
assert EVERY_RUN <= {*SCRIPTS, *TRAINED, *CONFIGURATIONS}


def worst(script: Script, unit: Any) -> float:
    """The largest difference to one process, of the loss and of all gradients."""
    difference, found, expected = gradients(script, unit)
    if script.parts or script.apart:
        assert {name: g.shape for name, g in found.items()} == {name: g.shape for name, g in expected.items()}
        difference = max(difference, *((found[n] - expected[n]).abs().max().item() for n in found))
    return difference


def trained(name: str, script: Script, unit: Any, folder: str) -> list[float]:
    engine = start(script, unit)
    if "resumed" not in name:
        losses = train(engine)
    else:
        losses = train(engine, slice(0, 1))
        engine.save_checkpoint(folder)
        engine.destroy()
        engine = start(script, unit)
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.fill_(3.0)
        engine.load_checkpoint(folder)
        losses += train(engine, slice(1, None))
    engine.destroy()
    return losses


def shapes(script: Script, unit: Any) -> list[int]:
    engine = start(script, unit)
    found = list(engine.module.layers[0].local[0].fc1.weight.shape)
    engine.destroy()
    return found


def interleaved(unit: Any) -> Any:
    """Two engines of one ep_size whose experts lie on other ranks, in turns."""
    engines = [start(TRAINED["parts, ZeRO-1, resumed"], unit), start(Script({}, 2, **WHOLE), unit)]
    losses: list[list[float]] = [[], []]
    for number in range(STEPS):
        for engine, found in zip(engines, losses, strict=True):
            found += train(engine, slice(number, number + 1))
    for engine in engines:
        engine.destroy()
    return losses


def own_configurations(ep_size: int, tensor: int, said: bool, residual: bool) -> Any:
    """As in DeepSpeed's test of experts under tensor parallelism; what its groups say while the engine is there, and after it."""
    stock, unit = deepspeed.utils.groups, Unit(tensor)
    type(get_accelerator()).is_fp16_supported = lambda self: True
    torch.manual_seed(Topology(4, tensor, ep_size, said).expert_data_group(dist.get_rank())[0])
    expert = nn.Sequential(nn.Linear(16, 64 // tensor), nn.ReLU(), nn.Linear(64 // tensor, 16))
    model = MoE(16, expert, 4, ep_size, use_residual=residual, enable_expert_tensor_parallelism=said)
    own = [parameter.clone() for parameter in model.deepspeed_moe.experts.parameters()]
    config = {"train_batch_size": 8, "fp16": {"enabled": True, "loss_scale": 1}, "axonn": {"ted": {}}}
    optimizer = torch.optim.AdamW(model.parameters())
    engine = deepspeed.initialize(config=config, model=model, optimizer=optimizer, dist_init_required=False, mpu=unit)[
        0
    ]
    kept = all(torch.equal(a.half(), b) for a, b in zip(own, engine.module.local.parameters(), strict=True))
    name = f"ep_size_{ep_size}"
    said_by_stock = {
        "tensor": stock._get_expert_model_parallel_world_size(),
        "expert": list(stock._get_expert_parallel_group_ranks(name)),
        "expert data": list(stock._get_expert_data_parallel_group_ranks(name)),
        "sizes": (stock._get_expert_parallel_world_size(name), stock._get_expert_data_parallel_world_size(name)),
        "places": (stock._get_expert_parallel_rank(name), stock._get_expert_data_parallel_rank(name)),
        "largest": stock._get_max_expert_size_name(),
        "model": (stock._get_model_parallel_world_size(), stock._get_data_parallel_world_size()),
        "experts": engine.module.num_local_experts,
    }
    engine.destroy()
    after = stock._get_expert_model_parallel_world_size(), name in stock._get_expert_parallel_group_dict()
    return kept, said_by_stock, after


def everything(folder: str, wanted: set[Any]) -> dict[Any, Any]:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a kernel that nothing here needs
    unit = Unit()
    found: dict[Any, Any] = {name: attempt(worst, script, unit) for name, script in SCRIPTS.items() if name in wanted}
    for name, script in [(name, script) for name, script in TRAINED.items() if name in wanted]:
        found[name] = attempt(trained, name, script, unit, str(Path(folder)))
    found["interleaved"] = attempt(interleaved, unit)
    for case in [case for case in CONFIGURATIONS if case in wanted]:
        found[case] = attempt(own_configurations, *case)
    unsummed = Script({}, 2, sums=False)
    found["unsummed"] = attempt(gradients, unsummed, unit)
    kept = {"said": Script({}, 2, parts=False, marked=False), "split": SCRIPTS["whole, for tensor ranks to split"]}
    found["shapes"] = {name: attempt(shapes, script, unit) for name, script in kept.items()}
    deepspeed.utils.groups.mpu = None
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return {name: [rank[name] for rank in everyone] for name in found}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    wanted = {value for values in asked(request, "name", "case") for value in values}
    return run_ranks(everything, 4, str(tmp_path_factory.mktemp("checkpoint")), wanted)[0]


@pytest.mark.parametrize("name", names(SCRIPTS, EVERY_RUN))
def test_gradients_are_those_of_one_process(found: Any, name: str) -> None:
    for rank in found[name]:
        assert not isinstance(rank, str), rank
        assert rank < 1e-10


@pytest.mark.parametrize("name", names(TRAINED, EVERY_RUN))
def test_trains_what_one_process_trains(found: Any, name: str) -> None:
    assert not isinstance(found[name][0], str), found[name][0]
    assert found[name][0] == pytest.approx(serial_losses(TRAINED[name], 2), rel=2e-6)


def test_engines_in_turns(found: Any) -> None:
    assert not isinstance(found["interleaved"][0], str), found["interleaved"][0]
    expected = serial_losses(Script({}, 2), 2)
    for losses in found["interleaved"][0]:
        assert losses == pytest.approx(expected, rel=2e-6)


def test_parts_that_nobody_sums_are_refused(found: Any) -> None:
    for message in found["unsummed"]:
        assert (
            "ranks 0 to 1 are one tensor group, and its parts of an expert give other outputs for the same" in message
        )


def test_experts_that_the_layers_call_split_keep_their_shapes(found: Any) -> None:
    assert found["shapes"] == 4 * [{"said": [INNER, HIDDEN], "split": [INNER // TENSOR, HIDDEN]}]


@pytest.mark.parametrize("case", [case if case in EVERY_RUN else thorough(case) for case in CONFIGURATIONS])
def test_groups_say_where_experts_are(found: Any, case: tuple) -> None:
    ep_size, tensor, said, _ = case
    topology = Topology(4, tensor, ep_size, said)
    for rank, result in enumerate(found[case]):
        assert not isinstance(result, str), result
        kept, told, after = result
        assert kept
        assert told == {
            "tensor": tensor if said else 1,
            "expert": topology.expert_group(rank),
            "expert data": topology.expert_data_group(rank),
            "sizes": (ep_size, topology.expert_data),
            "places": (topology.expert_group(rank).index(rank), topology.expert_data_group(rank).index(rank)),
            "largest": f"ep_size_{ep_size}",
            "model": (tensor, 4 // tensor),
            "experts": 4 // ep_size,
        }
        assert after == (1, False)
