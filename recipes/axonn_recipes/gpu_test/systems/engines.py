"""Systems of the block under DeepSpeed: losses beside the serial model's, and steps beside stock DeepSpeed's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import axonn_plugins
from axonn_recipes.gpu_test.scale import EXACT, Check, Found, Scale, apart
from axonn_recipes.gpu_test.training import (
    LEARNING_RATE,
    WEIGHT_DECAY,
    Serial,
    gpt,
    mean,
    multiplied,
    readers_part,
    serial,
    timed,
    utilisation,
    windows,
)


def prepare() -> None:
    """Have DeepSpeed know the block and compile nothing that training does without."""
    axonn_plugins.activate()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist.get_backend(), verbose=False)


def configuration(micro: int, accumulation: int, dtype: str, block: Mapping[str, Any] | None) -> dict[str, Any]:
    """ds_config of ZeRO-1; unclipped.

    Args:
        micro: windows of a reader and pass.
        accumulation: passes of a step.
        dtype: "float64", "float32" or "bfloat16".
        block: under "axonn"; None: stock.
    """
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "torch_adam": True},
        },
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_optimization": {"stage": 1},
        "zero_force_ds_cpu_optimizer": False,
    }
    return made if block is None else made | {"axonn": dict(block)}


def readers(block: Mapping[str, Any] | None, ranks: int) -> int:
    """Ranks that read different data."""
    block = block or {}
    tensor, ted = block.get("tensor_parallel", {}), block.get("ted", {})
    return ranks // (tensor.get("gx", 1) * tensor.get("gy", 1) * ted.get("tensor", 1))


def start(model: nn.Module, config: Mapping[str, Any]) -> Any:
    """DeepSpeed's engine."""
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=dict(config))[0]


def reader_of(engine: Any, block: Mapping[str, Any] | None) -> int:
    """The number of this rank among those that read different data."""
    mesh = getattr(engine, "mesh", None)
    if mesh is not None:
        return mesh.rank("readers")
    return dist.get_rank() // (block or {}).get("ted", {}).get("tensor", 1)


def losses(scale: Scale, model: nn.Module, block: Mapping[str, Any]) -> list[float]:
    """Losses of the compared steps under the block, in float64."""
    parts = readers(block, scale.ranks)
    config = configuration(scale.windows // parts, 1, "float64", block)
    engine, found = start(model.double(), config), []
    for ids, targets in readers_part(scale, parts, reader_of(engine, block)):
        loss = engine(ids, targets)
        engine.backward(loss)
        engine.step()
        found.append(mean(loss.detach()))
    engine.destroy()
    return found


def stepper(
    scale: Scale, model: nn.Module, block: Mapping[str, Any] | None, change: Mapping[str, Any] | None = None
) -> Callable[[], None]:
    """A step of `scale.batch` windows a rank, whatever ranks read.

    Args:
        scale: the run's.
        model: in any type.
        block: under "axonn"; None: stock.
        change: what else of the configuration is different.
    """
    micro = scale.batch * scale.ranks // readers(block, scale.ranks)
    config = configuration(micro, 1, scale.dtype, block) | dict(change or {})
    engine = start(model.to(getattr(torch, scale.dtype)), config)
    batch = windows(scale.timed, micro, reader_of(engine, block)).to(scale.place)

    def step() -> None:
        loss = engine(batch[:, :-1], batch[:, 1:])
        engine.backward(loss)
        engine.step()

    return step


@dataclass(frozen=True)
class Beside:
    """A system of the block beside stock DeepSpeed.

    Attributes:
        name: in the report.
        block: under "axonn".
        change: of stock's configuration.
    """

    name: str
    block: Mapping[str, Any]
    change: Mapping[str, Any] = field(default_factory=dict)

    def run(self, scale: Scale) -> Found:
        """Compare and time a GPT."""
        prepare()
        expected: Serial = serial(scale, lambda: gpt(scale.compared), self.block)
        found = Found()
        mine = losses(scale, gpt(scale.compared), self.block)
        found.checks.append(Check("losses", apart(mine, expected.losses), EXACT))
        ours = timed(self.name, True, lambda: stepper(scale, gpt(scale.timed), self.block), scale)
        theirs = timed("stock DeepSpeed", False, lambda: stepper(scale, gpt(scale.timed), None, self.change), scale)
        found.sides += [ours, theirs]
        found.figures += [utilisation(side, scale, multiplied(scale.timed)) for side in found.sides]
        return found
