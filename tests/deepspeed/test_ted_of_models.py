"""HF mixtures of experts under `deepspeed.initialize` with ``axonn.ted``: losses, weights and checkpoints are one process's."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from axonn_plugins.observe.ledger import Ledger
from tests import groups
from tests.axonn_tp.families import in_float64
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.ted_moe.mixtures import mixture, tokens

STEPS, CLIP = 4, 0.5
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "expert, ZeRO-0": ({"ted": {}}, 0),
    "expert, ZeRO-1": ({"ted": {"expert": 2}}, 1),
    "tensor, ZeRO-2": ({"ted": {"tensor": 2}}, 2),
    "grid, ZeRO-1": ({"ted": {}, "tensor_parallel": {"gx": 2, "gy": 1, "gz": 2, "plan": "auto"}}, 1),
    "lists, ZeRO-1": ({"ted": {"expert": 2}}, 1),
}
EVERY_RUN = {"tensor, ZeRO-2", "grid, ZeRO-1"}
"""Experts in a list are trained in test_whole_matrices.py, too."""
MODELS = {"lists, ZeRO-1": "a list"}


def start(block: dict[str, Any], stage: int, model: nn.Module | None = None, **settings: Any) -> Any:
    import axonn_plugins

    groups.reuse()
    type(get_accelerator()).is_fp16_supported = lambda self: True
    axonn_plugins.activate()
    model = mixture("Mixtral") if model is None else model
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "axonn": block,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config | settings)[0]


def readers(engine: Any) -> tuple[int, int]:
    group = engine.data_parallel_group
    return dist.get_rank(group), dist.get_world_size(group)


def train(engine: Any, steps: range) -> list[float]:
    """Losses; in step s reader r has the tokens that `serial_losses` gives it."""
    reader, number = readers(engine)
    losses = []
    with in_float64():
        for step in steps:
            ids = tokens((reader + step) % number)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            total = loss.detach().double()
            dist.all_reduce(total, group=engine.data_parallel_group)
            losses.append(total.item() / number)
    return losses


@cache
def serial_losses(number: int, name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of one process with the tokens of so many readers, and its weights at the end."""
    model = mixture(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    with in_float64():
        for _ in range(STEPS):
            parts = [model(input_ids=tokens(r), labels=tokens(r)).loss / number for r in range(number)]
            optimizer.zero_grad()
            sum(parts).backward()  # type: ignore[union-attr]
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            losses.append(sum(part.item() for part in parts))
    return losses, model.state_dict()


def trained(folder: str, names: list[str]) -> dict[str, tuple[float, float]]:
    """Of losses and of the whole weights at the end, which another layout begins where the first has stopped."""
    found = {}
    for name in names:
        block, stage = CASES[name]
        of = MODELS.get(name, "Mixtral")
        engine = start(block, stage, mixture(of))
        readings = readers(engine)[1]
        losses = train(engine, range(2))
        engine.save_checkpoint(f"{folder}/{name}")
        again = {"ted": {"expert": 1}} if readings == 4 else {"ted": {"tensor": 2, "expert": 1, "fused": False}}
        engine.destroy()
        other = mixture(of)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.fill_(3.0)
        engine = start(again, 1, other)
        engine.load_checkpoint(f"{folder}/{name}")
        losses += train(engine, range(2, STEPS))
        expected, weights = serial_losses(readings, of)
        state = engine.module.state_dict()
        engine.save_16bit_model(folder, f"{stage}.bin")
        dist.barrier()
        saved = torch.load(f"{folder}/{stage}.bin")
        assert saved.keys() == weights.keys() and all(torch.equal(saved[key], state[key]) for key in saved)
        assert state.keys() == weights.keys()
        for key, parameter in engine.module.named_parameters():
            parameter.requires_grad_(".experts." not in key)
        engine.save_16bit_model(folder, f"{stage} trained.bin", exclude_frozen_parameters=True)
        dist.barrier()
        assert torch.load(f"{folder}/{stage} trained.bin").keys() == {key for key in weights if ".experts." not in key}
        apart = max((state[key] - weights[key]).abs().max().item() for key in weights)
        found[name] = max(abs(a - b) for a, b in zip(losses, expected, strict=True)), apart
        engine.destroy()
    return found


@pytest.mark.parametrize("every", [False, thorough(True)])
def test_training_equals_one_process_and_goes_on_in_another_layout(every: bool, tmp_path: Path) -> None:
    names = [name for name in CASES if every or name in EVERY_RUN]
    for number, name in ((4, "Mixtral"), (2, "Mixtral"), *([(4, "a list")] if every else [])):
        serial_losses(number, name)  # which ranks inherit
    for found in run_ranks(trained, 4, str(tmp_path), names):
        assert [*found] == names
        assert not {name: far for name, far in found.items() if max(far) > 1e-8 or math.isnan(max(far))}


def recomputed(every: bool) -> dict[str, Counter]:
    """Collectives of a forward and backward, with and without HF's gradient checkpointing."""
    found = {}
    for name, checkpointing, keep in (("none", False, True), ("again", True, False), ("kept", True, True)):
        if name == "again" and not every:
            continue
        model = mixture("Mixtral")
        if checkpointing:
            model.gradient_checkpointing_enable()
        engine = start({"ted": {"tensor": 2, "expert": 2, "communication_aware_checkpointing": keep}}, 0, model)
        engine.train()
        train(engine, range(1))  # in the first step plans are verified
        ids = tokens(readers(engine)[0])
        with in_float64(), Ledger(engine.groups.axis_names()) as ledger:
            engine.backward(engine(input_ids=ids, labels=ids).loss)
        found[name] = Counter((each.op, each.axis) for each in ledger.collectives)
        engine.destroy()
    return found


@pytest.mark.thorough  # nor in ted_moe/test_moe.py, in every run
@pytest.mark.parametrize("every", [False, True])
def test_a_recomputation_communicates_nothing(every: bool) -> None:
    layers = 2
    for found in run_ranks(recomputed, 4, every):
        # Numbers of rows, rows to the experts and back, and the mirrors of the last two; and whether all ranks begin backward.
        assert found["none"]["all_to_all", "expert"] == layers * (1 + 2 + 2) + 1
        if every:
            assert found["again"]["all_to_all", "expert"] == layers * (1 + 2 + 2 + 1 + 2) + 1
        for kind in ("all_to_all", "all_gather", "reduce_scatter"):
            alike = {key: number for key, number in found["kept"].items() if key[0] == kind}
            assert alike == {key: number for key, number in found["none"].items() if key[0] == kind}


def over_z() -> float:
    """Largest difference of losses from one process, where weights of checkpointed blocks are gathered over z, ahead of their layers."""
    model = mixture("Mixtral")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = start({"tensor_parallel": {"gx": 1, "gy": 1, "gz": 2, "plan": "auto"}, "ted": {"expert": 2}}, 0, model)
    engine.train()
    losses, (expected, _) = train(engine, range(STEPS)), serial_losses(2, "Mixtral")
    engine.destroy()
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))


def test_a_recomputation_gathers_weights_over_z() -> None:
    serial_losses(2, "Mixtral")
    assert max(run_ranks(over_z, 2)) < 1e-8


def halves(blocks: dict[str, Any]) -> dict[str, list[float]]:
    """Losses in bfloat16, of a stock engine and of ours."""
    found = {}
    for name, block in {"stock": None, **blocks}.items():
        model = mixture("Mixtral").float()
        slow = {
            "type": "AdamW",
            "params": {"lr": 1e-3, "torch_adam": True},
        }  # steps of other sizes send tokens elsewhere
        engine = start(block or {}, 1, model, bf16={"enabled": True}, optimizer=slow)
        reader, number = readers(engine)
        found[name] = []
        for step in range(3):
            ids = tokens((reader + step) % 2)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            total = loss.detach().double()
            dist.all_reduce(total, group=engine.data_parallel_group)
            found[name].append(total.item() / number)
        engine.destroy()
    return found


@pytest.mark.parametrize(
    "blocks", [thorough({"expert": {"ted": {}}}), {"tensor": {"ted": {"tensor": 2}}}], ids=["expert", "tensor"]
)
def test_halves_train_as_under_stock_deepspeed(blocks: dict[str, Any]) -> None:
    for found in run_ranks(halves, 4, blocks):
        assert found.keys() - blocks.keys() == {"stock"}
        for name in blocks:
            assert found[name] == pytest.approx(found["stock"], rel=2e-2)


class Loop(nn.Module):
    """A mixture that runs over its experts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(expert(x).sum() for expert in self.experts)  # type: ignore[return-value]


def tile_beside(settings: dict[str, Any]) -> str:
    """The size of tiles beside what DeepSpeed's own optimizers are not tiled with."""
    engine = start({"ted": {"tile_size": 1000}}, 1, mixture("Mixtral").float(), **settings)
    size = engine.optimizer.tile_size
    engine.destroy()
    return str(size)


def penalty() -> None:
    """A loss with squares of all weights, of which a rank has its own experts'."""
    engine, ids = start({"ted": {"expert": 2}}, 0), tokens(0)
    with in_float64():
        loss = engine(input_ids=ids, labels=ids).loss
    squares = sum(parameter.square().sum() for parameter in engine.module.parameters())
    engine._losses.look(loss + 0 * squares)
    try:
        engine.backward(loss + 1e-3 * squares)
    finally:
        engine.destroy()


def refused() -> dict[str, str]:
    return {
        "a penalty": attempt(penalty),
        "a loop": attempt(lambda: start({"ted": {}}, 0, Loop())),
        "three": attempt(lambda: start({"ted": {"expert": 3}}, 0)),
        "dense": attempt(lambda: start({"ted": {"expert": 2}}, 0, nn.Linear(8, 8))),
        "fits": attempt(lambda: start({"ted": {"tensor": 2, "expert": 2}}, 0).destroy() or ""),
        "tiles": attempt(tile_beside, {"data_types": {"grad_accum_dtype": "fp32"}, "bf16": {"enabled": True}}),
        "tiles in host memory": attempt(
            tile_beside, {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
        ),
        "too many": attempt(lambda: start({"ted": {"tensor": 2, "expert": 4}}, 0)),
    }


def test_what_cannot_be_obeyed_ends_the_run_with_the_reason() -> None:
    for said in run_ranks(refused, 4):
        assert "layer experts (ModuleList) holds experts, but its forward does not take" in said["a loop"]
        assert "expert = 3 does not divide the 4 experts of layer model.layers.0.mlp.experts" in said["three"]
        assert (
            "axonn.ted: the loss reads model.layers.0.mlp.experts.gate_up_proj outside of the experts' module"
            in said["a penalty"]
        )
        assert said["fits"] == "" and said["tiles"] == said["tiles in host memory"] == "1000"
        assert "axonn.ted.expert = 2, and no experts were found in Linear" in said["dense"]
        assert "expert = 4 does not divide gz*gdata = 1*2 = 2" in said["too many"]
