"""A system of a user's own works under every host, on any grid, beside the suite's."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from axonn_plugins.config import ConfigError, parse
from axonn_plugins.hosts.plain import compose
from tests.compose.noise import GradientNoise
from tests.compose.training import Case, adamw, ready, run, serial_run, train_plain
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks, same_on_all
from tests.matrix import thorough

NOISE: dict[str, Any] = {"gradient_noise": {"std": 0.3}}
BLOCKS: dict[str, tuple[dict[str, Any], int, int | None]] = {
    "alone": ({}, 1, None),
    "split": ({"tensor_parallel": {"gx": 2, "gz": 2, "plan": "auto"}}, 2, None),
    "pruned": ({"samo": {"sparsity": 0.6}, "tensor_parallel": {"gy": 2, "plan": "auto"}}, 1, None),
    "experts": ({"ted": {"tensor": 2}, "offload_optimizer": {}}, 2, 2),
}
EVERY_RUN = {("DeepSpeed", "split"), ("plain PyTorch", "pruned"), ("DeepSpeed", "experts")}
"""And a pipeline."""


def plain(case: Case) -> Any:
    """In a loop of one's own: losses, norms, and those of one process."""
    made = compose(case.serial(), adamw, case.block, stage=case.stage, max_norm=case.clip)
    losses, norms = train_plain(made, case)
    # Another rank's state, whose shards are as large.
    refused = attempt(made.optimizer.load_state_dict, same_on_all(made.optimizer.state_dict()))
    first = all(made.mesh.rank(axis) == 0 for axis in "xyz")
    assert refused is None if first else "ValueError: the state is of weights' shards 0 of 2 over " in refused, refused
    return losses, norms, *serial_run(case, made.mesh.grid.batch)


def kinds(model: nn.Module) -> list[dict[str, Any]]:
    """Groups as scripts make them: what is no matrix is not decayed."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0, "lr": 3e-2}]


def grouped(case: Case) -> list[float]:
    """Largest differences from one process, of weights that were trained in groups with options of their own; and what is refused."""
    torch.manual_seed(1)
    serial = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    model, other = copy.deepcopy(serial), copy.deepcopy(serial)
    optimizer = torch.optim.AdamW(kinds(serial), lr=1e-2)
    with pytest.raises(ConfigError, match="compose was given 4 parameters that are not the model's"):
        compose(model, partial(torch.optim.AdamW, lr=1e-2), case.block, parameters=other.parameters())
    made = compose(model, partial(torch.optim.AdamW, lr=1e-2), case.block, stage=case.stage, parameters=kinds(model))
    for _ in range(3):
        batch = torch.randn(4, 4, dtype=torch.float64)
        serial(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        made.backward(made.model(made.mesh.shard_batch(batch)).square().mean())
        made.step()
    found = made.model.state_dict()
    return [(found[name] - whole).abs().max().item() for name, whole in serial.state_dict().items()]


def runs(every: bool) -> dict[str, Any]:
    ready(staged=True)
    found = {}
    for name, (block, stage, experts) in BLOCKS.items():
        case = Case(NOISE | block, stage, experts)
        for host, trained in (("DeepSpeed", run), ("plain PyTorch", plain))[: 1 if experts else 2]:
            if every or (host, name) in EVERY_RUN:
                found[f"{host}, {name}"] = attempt(trained, case)
    staged = Case(NOISE | {"tensor_parallel": {"gx": 2, "plan": "auto"}}, 1, stages=2, tied=True)
    found["DeepSpeed, pipeline"] = attempt(run, staged)
    found["groups"] = attempt(grouped, Case({"tensor_parallel": {"gx": 2, "gy": 1, "gz": 2, "plan": "auto"}}, 1))
    return found


@pytest.mark.parametrize("every", [False, thorough(True)])
def test_trains_as_one_process_does(every: bool) -> None:
    found = run_ranks(runs, 4, every)[0]
    groups = found.pop("groups")
    assert not isinstance(groups, str) and max(groups) < 1e-10, groups
    assert len(found) == (8 if every else 4)
    for name, result in found.items():
        assert not isinstance(result, str), f"{name}: {result}"
        losses, norms, wanted, wanted_norms = result
        assert losses == pytest.approx(wanted, rel=1e-10), name
        assert norms == pytest.approx(wanted_norms, rel=1e-10), name


def test_mistakes_in_its_key_are_said_as_in_the_suites() -> None:
    assert isinstance(parse(NOISE).others["gradient_noise"], GradientNoise.Block)
    for block, words in {
        "unknown": ({"gradient_noise": {"std": 1.0, "dcay": 1.0}}, 'use "decay"'),
        "missing": ({"gradient_noise": {}}, "axonn.gradient_noise.std is missing"),
        "near": ({"gradient_nois": {}}, 'use "gradient_noise"'),
    }.values():
        with pytest.raises(ConfigError) as caught:
            parse(block)
        assert words in str(caught.value)
    with pytest.raises(ValueError, match="axonn.samo is a key of the suite"):
        type("Mine", (GradientNoise,), {}, key="samo")
