"""Ranks that disagree on a key, an argument or the model end together, with what differs and on whom, whatever the engine."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import nn

import axonn_plugins
import axonn_plugins.config
from axonn_plugins.hosts.common.agreement import first_difference
from axonn_plugins.hosts.common.fingerprint import of_configuration, of_model
from tests.deepspeed.scripts import one_sentence
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks

SYSTEMS: dict[str, dict[str, Any]] = {
    "tensor_parallel": {"tensor_parallel": {"gx": 2}},
    "auto sizes": {"tensor_parallel": {"gx": "auto", "gy": 1, "gz": 1, "tokens_per_sample": 1, "machine": "alps"}},
    "ted": {"ted": {}},
    "ted split": {"ted": {"tensor": 2}},
    "samo": {"samo": {"sparsity": 0.5}},
    "offload_optimizer": {"offload_optimizer": {}},
    "pipeline": {"pipeline": {}},
    "pipeline, one stage": {"pipeline": {}},
    "pipeline and offload": {"pipeline": {}, "offload_optimizer": {}},
}
Change = Callable[[dict[str, Any]], Any]


def net(width: int = 8) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, width), nn.Linear(width, 4))


def client(kind: type, **settings: Any) -> Change:
    """The script gives an optimizer: on rank 0 AdamW."""

    def change(keywords: dict[str, Any]) -> None:
        keywords["optimizer"] = kind(keywords["model"].parameters(), **{"lr": 0.1, **settings})
        keywords.pop("model_parameters")

    return change


# What rank 1 changes in the arguments of `deepspeed.initialize`, and what the sentence says.
CHANGES: dict[str, tuple[Change, str]] = {
    "learning rate": (
        lambda k: k["config"]["optimizer"]["params"].update(lr=0.2),
        "optimizer.params.lr is 0.1 on rank 0 and 0.2 on rank 1; start all ranks",
    ),
    "clipping": (
        lambda k: k["config"].update(gradient_clipping=0.5),
        "gradient_clipping is 1.0 on rank 0 and 0.5 on rank 1",
    ),
    "a key of one rank": (
        lambda k: k["config"].update(prescale_gradients=False),
        "prescale_gradients is not there on rank 0 and false on rank 1",
    ),
}
ARGUMENTS: dict[str, tuple[Change, str]] = {
    "group": (
        lambda k: k["model_parameters"][1].update(weight_decay=0.5),
        "weight_decay of model_parameters group 1 is 0.0 on rank 0 and 0.5 on rank 1",
    ),
    "width": (
        lambda k: k.update(model=net(9)),
        "the model's parameter 0.weight is 8x16 float32, trained on rank 0 and 9x16 float32, trained on rank 1",
    ),
    "frozen": (
        lambda k: k["model"][1].bias.requires_grad_(False),
        "the model's parameter 1.bias is 4 float32, trained on rank 0 and 4 float32, not trained on rank 1",
    ),
    "dropout": (
        lambda k: k["model"].append(nn.Dropout(0.2)),
        "the model's layer 2 is not there on rank 0 and Dropout(p=0.2, inplace=False) on rank 1",
    ),
    "optimizer": (client(torch.optim.SGD, momentum=0.9), "optimizer is AdamW on rank 0 and SGD on rank 1"),
    "rate": (client(torch.optim.AdamW, lr=0.3), "lr of optimizer group 0 is 0.1 on rank 0 and 0.3 on rank 1"),
    "betas": (
        client(torch.optim.AdamW, betas=(0.8, 0.9)),
        "betas of optimizer group 0 is [0.9, 0.999] on rank 0 and [0.8, 0.9] on rank 1",
    ),
}
# Rank 0 alone gives an optimizer.
ALONE = {
    "tensor_parallel": "optimizer is AdamW on rank 0 and not there on rank 1",
    "samo": "rank 1: axonn.samo is about an optimizer's state, and there is no optimizer",
    "pipeline and offload": "rank 1: axonn.offload_optimizer is about an optimizer's state, and there is no optimizer",
}
HARMLESS: dict[str, Change] = {
    "paths": lambda k: k["config"].update(tensorboard={"enabled": False, "output_path": "/here"}, local_rank=1),
    "an iterator": lambda k: k.update(model_parameters=iter(k["model_parameters"])),
}


def arguments(system: str) -> dict[str, Any]:
    block = copy.deepcopy(SYSTEMS[system])
    config = {
        "train_batch_size": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "axonn": block,
    }
    model: nn.Module = net()
    if "pipeline" in system:
        stages = 1 if "one stage" in system else 2
        layers = list(net())
        model = PipelineModule(layers, num_stages=stages, loss_fn=nn.MSELoss(), partition_method="uniform")
    vectors = [p for p in model.parameters() if p.dim() < 2]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": matrices, "lr": 0.1}, {"params": vectors, "lr": 0.1, "weight_decay": 0.0}]
    return {"model": model, "config": config, "model_parameters": groups}


def initialize(keywords: dict[str, Any]) -> str:
    """Initialize an engine; returns the refusal, or "trains"."""
    try:
        engine = deepspeed.initialize(**keywords)[0]
    except axonn_plugins.config.ConfigError as error:
        return str(error)
    finally:
        gc.collect()
    engine.destroy()
    return "trains"


def started(system: str, change: Change, client_side: bool = False) -> str:
    keywords = arguments(system)
    if client_side:
        keywords["config"].pop("optimizer")
        if dist.get_rank() == 0:
            client(torch.optim.AdamW)(keywords)
    if dist.get_rank() == 1:
        change(keywords)
    return initialize(keywords)


def every_case() -> dict[str, str]:
    axonn_plugins.activate()
    found = {}
    for system in SYSTEMS:
        found[f"{system}: alike"] = attempt(started, system, lambda keywords: None)
        for name, (change, _) in CHANGES.items():
            found[f"{system}: {name}"] = attempt(started, system, change)
    for name, (change, _) in ARGUMENTS.items():
        for system in ("tensor_parallel", "samo", "offload_optimizer"):
            found[f"{system}: {name}"] = attempt(started, system, change, name in ("optimizer", "rate", "betas"))
    for system in ALONE:
        found[f"{system}: alone"] = attempt(started, system, lambda keywords: keywords.pop("model_parameters"), True)
    for name, change in HARMLESS.items():
        found[f"tensor_parallel: {name}"] = attempt(started, "tensor_parallel", change)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, str]]:
    return run_ranks(every_case, 2)


@pytest.mark.parametrize("system", SYSTEMS)
def test_keys_of_the_configuration(system: str, ranks: list[dict[str, str]]) -> None:
    for rank in ranks:
        assert rank[f"{system}: alike"] == "trains"
        for name, (_, said) in CHANGES.items():
            sentence = rank[f"{system}: {name}"]
            assert sentence.startswith(said) and one_sentence(sentence), sentence


def test_an_optimizer_on_some_ranks_only(ranks: list[dict[str, str]]) -> None:
    for rank in ranks:
        for system, said in ALONE.items():
            assert rank[f"{system}: alone"].startswith(said), rank[f"{system}: alone"]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str, ranks: list[dict[str, str]]) -> None:
    for rank in ranks:
        for system in ("tensor_parallel", "samo", "offload_optimizer"):
            assert rank[f"{system}: {name}"].startswith(ARGUMENTS[name][1]), rank[f"{system}: {name}"]


@pytest.mark.parametrize("name", HARMLESS)
def test_what_ranks_may_have_each_its_own(name: str, ranks: list[dict[str, str]]) -> None:
    assert [rank[f"tensor_parallel: {name}"] for rank in ranks] == ["trains", "trains"]


def test_many_ranks_and_long_values() -> None:
    everyone = {rank: {"same": "1", "plan": "x" * 300 + ("a" if rank < 9 else "b")} for rank in range(12)}
    sentence = first_difference(everyone)
    assert "on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1 more and " in sentence and "on ranks 9, 10, 11;" in sentence
    assert len(sentence) < 400 and "xa..." in sentence and "xb..." in sentence


def test_a_stage_that_lacks_a_group_is_told_to_have_it_empty() -> None:
    everyone = {
        0: {"lr of optimizer group 0": "1"},
        1: {"lr of optimizer group 0": "1", "lr of optimizer group 1": "2"},
    }
    assert first_difference(everyone) == (
        "lr of optimizer group 1 is not there on rank 0 and 2 on rank 1; start all ranks with the same groups of parameters, "
        "with none in those that a stage lacks"
    )


def test_places_are_not_compared() -> None:
    offload = {"device": "nvme", "nvme_path": "/here"}
    raw = {"zero_optimization": {"offload_optimizer": offload}, "axonn": {"tensor_parallel": {"trace_folder": "/here"}}}
    assert of_configuration(raw) == {"zero_optimization.offload_optimizer.device": '"nvme"'}


def test_ties_and_buffers_are_facts() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    apart = of_model(model)
    model[1].weight = model[0].weight
    assert (
        of_model(model)["the model's parameter 1.weight"]
        == "that of 0.weight"
        != apart["the model's parameter 1.weight"]
    )
    assert apart["the model's buffer 2.num_batches_tracked"] == "one number int64, not trained"
