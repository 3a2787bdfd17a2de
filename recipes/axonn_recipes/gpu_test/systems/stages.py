"""The message-driven pipeline beside DeepSpeed's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

from axonn_recipes.gpu_test.scale import EXACT, STAGES, STEPS, Check, Found, Scale, apart
from axonn_recipes.gpu_test.systems.engines import configuration, prepare
from axonn_recipes.gpu_test.training import gpt, multiplied, serial, timed, utilisation, windows
from axonn_recipes.models.gpt import GPTConfig
from axonn_recipes.pipeline.sides import Part, entropy

_BLOCK: dict[str, Any] = {"pipeline": {"schedule": "message_driven"}}
_MICROBATCHES = 8


def run(scale: Scale) -> Found:
    """Losses with some numbers of stages, times with the largest."""
    prepare()
    expected, found = serial(scale, lambda: gpt(scale.compared)), Found()
    lengths = [stages for stages in STAGES if scale.ranks % stages == 0] or [scale.ranks]
    for stages in lengths:
        found.checks.append(Check(f"{stages} stages: losses", apart(_losses(scale, stages), expected.losses), EXACT))
    stages = lengths[-1]
    for name, block in (("axonn.pipeline", _BLOCK), ("DeepSpeed's 1F1B", None)):
        side = timed(f"{name}, {stages} stages", block is not None, partial(_stepper, scale, stages, block), scale)
        found.sides.append(side)
        sequences = _MICROBATCHES * scale.ranks // stages
        found.figures.append(utilisation(side, scale, multiplied(scale.timed), sequences))
    return found


def _engine(config: GPTConfig, stages: int, dtype: str, microbatches: int, block: Any, where: torch.device) -> Any:
    layers = [LayerSpec(Part, config, 1, number) for number in range(config.layers + 2)]
    with where:
        module: nn.Module = PipelineModule(layers, num_stages=stages, loss_fn=entropy, partition_method="uniform")
    module = module.to(getattr(torch, dtype))
    made = configuration(1, microbatches, dtype, block)
    return deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=made)[0]


def _losses(scale: Scale, stages: int) -> list[float]:
    pipelines = scale.ranks // stages
    each = scale.windows // pipelines
    engine, found = _engine(scale.compared, stages, "float64", each, _BLOCK, torch.device("cpu")), []
    for step in range(STEPS):
        batch = windows(scale.compared, scale.windows, step).chunk(pipelines)[engine.grid.get_data_parallel_rank()]
        batch = batch.to(scale.place)
        data = iter([(one[:, :-1], one[:, 1:]) for one in batch.split(1)])
        found.append(float(engine.train_batch(data)))
    engine.destroy()
    return found


def _stepper(scale: Scale, stages: int, block: Any) -> Callable[[], object]:
    engine = _engine(scale.timed, stages, scale.dtype, _MICROBATCHES, block, scale.place)
    batch = windows(scale.timed, _MICROBATCHES, engine.grid.get_data_parallel_rank()).to(scale.place)
    parts = [(one[:, :-1], one[:, 1:]) for one in batch.split(1)]
    return lambda: engine.train_batch(iter(parts))
