"""What the rest of a configuration may be beside ``axonn.pipeline``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipelineParallelGrid

from axonn_tp import Grid
from plugins.config import Axonn, ConfigError
from plugins.deepspeed import config_hook, samo_config
from plugins.deepspeed.config_hook import enabled, section


def use(block: Axonn, raw: Mapping[str, Any], mpu: Any) -> Any:
    """Check a configuration with the key, and lead `deepspeed.initialize` to the engine that obeys it.

    Args:
        block: the whole block.
        raw: the whole configuration.
        mpu: the pipeline's grid, once there is a PipelineModule.

    Returns:
        The mpu with which DeepSpeed should do its batch arithmetic.

    Raises:
        ConfigError: the first mistake.
    """
    _check(block, raw)
    if block.samo is not None:
        samo_config.check(raw, None)
    if isinstance(mpu, PipelineParallelGrid) and block.tensor_parallel is not None:
        from plugins.deepspeed.stage_split import stage_grid

        grid = stage_grid(block.tensor_parallel, mpu)
        config_hook.check(raw, grid)
        mpu = config_hook.BatchRanks(grid)
    elif isinstance(mpu, PipelineParallelGrid):
        config_hook.check_batch(raw, Grid(gdata=mpu.get_data_parallel_world_size()))
    config_hook.forget_unit()
    deepspeed.PipelineEngine = _engine(block)
    # A configuration may be parsed before the model is known.
    deepspeed.DeepSpeedEngine = _PlainModule
    deepspeed.DualPipeVEngine = _DualPipe
    return mpu


def _engine(block: Axonn) -> type[PipelineEngine]:
    if block.samo is not None:
        from plugins.deepspeed.samo_pipeline import SamoPipelineEngine

        return SamoPipelineEngine
    if block.tensor_parallel is not None:
        from plugins.deepspeed.tensor_pipeline import TensorPipelineEngine

        return TensorPipelineEngine
    from plugins.deepspeed.pipeline_engine import MessageDrivenEngine

    if block.offload_optimizer is not None:
        from plugins.deepspeed.offload_engine import OffloadEngine

        return type("OffloadPipelineEngine", (OffloadEngine, MessageDrivenEngine), {})
    return MessageDrivenEngine


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


def _check(block: Axonn, raw: Mapping[str, Any]) -> None:
    stage = section(raw, "zero_optimization").get("stage", 0)
    refusals = [
        (
            block.ted is not None,
            "axonn.pipeline does not go with axonn.ted under DeepSpeed yet; leave one of them out",
        ),
        *_of_tensor_parallel(block, stage),
        (
            stage in (2, 3),
            f"zero_optimization.stage = {stage} does not go with a PipelineModule, which reduces gradients once a batch; use stage 0 or 1",
        ),
        (enabled(raw, "fp16") and enabled(raw, "bf16"), "fp16.enabled and bf16.enabled are both true; turn one off"),
        *[
            (
                enabled(raw, half) and not supported(),
                f"{half}.enabled = true, but DeepSpeed finds no {half} on this device ({get_accelerator().device_name()}); use another precision",
            )
            for half, supported in (
                ("fp16", get_accelerator().is_fp16_supported),
                ("bf16", get_accelerator().is_bf16_supported),
            )
        ],
        (enabled(raw, "hybrid_engine"), "hybrid_engine has an engine of its own; remove it, or axonn.pipeline"),
    ]
    for refused, reason in refusals:
        if refused:
            raise ConfigError(reason)


def _of_tensor_parallel(block: Axonn, stage: Any) -> list[tuple[bool, str]]:
    settings = block.tensor_parallel
    if settings is None:
        return []
    return [
        (
            len(settings.given) < 3,
            'axonn.tensor_parallel has sizes that are "auto", which do not go with axonn.pipeline yet; give gx, gy and gz as numbers',
        ),
        (
            stage == 1,
            "zero_optimization.stage = 1 does not go with axonn.tensor_parallel inside the stages of a pipeline yet; use stage 0 and a larger "
            "gz, which splits optimizer state, too",
        ),
        (
            settings.tune_matmuls,
            "axonn.tensor_parallel.tune_matmuls does not go with axonn.pipeline yet, whose stages have different matmuls; turn it off",
        ),
        (
            settings.trace_steps is not None,
            "axonn.tensor_parallel.trace_steps does not go with axonn.pipeline, whose engine has record_events(); leave it out",
        ),
    ]
