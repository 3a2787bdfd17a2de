"""Conditions on the rest of a configuration beside ``axonn.pipeline``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
from deepspeed.runtime.pipe.topology import PipelineParallelGrid

from axonn_plugins.config import Axonn, ConfigError, batch
from axonn_plugins.hosts.deepspeed.pipeline.stage_split import key_of, settings_of, stage_grid
from axonn_plugins.hosts.deepspeed.sections import Refusal, enabled, of_checkpoints, of_halves, refuse, section
from axonn_plugins.hosts.deepspeed.tensor.config import BatchRanks, check, check_automatic, stand_in


def use(block: Axonn, raw: Mapping[str, Any], mpu: Any) -> Any:
    """Check a configuration with the key, and lead `deepspeed.initialize` to the engine that obeys it; see `config_hook.configure`."""
    refuse([*_refusals(block, raw), *of_checkpoints(raw)])
    split = settings_of(block)
    if isinstance(mpu, PipelineParallelGrid) and split is not None:
        automatic = len(split.given) < 3
        grid = stand_in(raw) if automatic else stage_grid(split, mpu, key_of(block))
        if automatic:
            check_automatic(split, raw)
        if block.tensor_parallel is None:  # a sentence names ted then
            from axonn_plugins.hosts.deepspeed.ted.config import check_rest

            check_rest(raw, grid)
        else:
            check(raw, grid)
        mpu = BatchRanks(grid)
    elif isinstance(mpu, PipelineParallelGrid):
        batch.check(raw, 1, mpu.get_data_parallel_world_size())
    from axonn_plugins.hosts.deepspeed.pipeline.engine import MessageDrivenEngine

    deepspeed.PipelineEngine = MessageDrivenEngine
    # A configuration may be parsed before the model is known.
    deepspeed.DeepSpeedEngine = _PlainModule
    deepspeed.DualPipeVEngine = _DualPipe
    return mpu


class _PlainModule:
    def __init__(self, *rest: Any, **keywords: Any) -> None:
        raise ConfigError(
            "axonn.pipeline is for a deepspeed.pipe.PipelineModule, and deepspeed.initialize was given another model; leave the key out, or "
            "make the model a PipelineModule"
        )


class _DualPipe:
    def __init__(self, *rest: Any, **keywords: Any) -> None:
        raise ConfigError(
            "axonn.pipeline has schedules of its own, and the model is a DualPipeVModule; leave the key out, or make the model a "
            "PipelineModule"
        )


def _refusals(block: Axonn, raw: Mapping[str, Any]) -> list[Refusal]:
    stage = section(raw, "zero_optimization").get("stage", 0)
    return [
        (
            stage in (2, 3),
            f"zero_optimization.stage = {stage} does not go with a PipelineModule, which reduces gradients once a batch; use stage 0 or 1",
        ),
        *of_halves(raw),
        (
            enabled(raw, "torch_autocast")
            and section(raw, "torch_autocast").get("dtype") in ("float16", "fp16", "half"),
            "torch_autocast.dtype = float16 has a loss scale on each stage of a pipeline, which would skip steps apart from the others; use "
            "bfloat16, or the fp16 section",
        ),
        (enabled(raw, "hybrid_engine"), "hybrid_engine has an engine of its own; remove it, or axonn.pipeline"),
    ]
