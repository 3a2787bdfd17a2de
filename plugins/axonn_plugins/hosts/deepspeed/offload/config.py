"""What the rest of a configuration may be beside ``axonn.offload_optimizer``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
from deepspeed.runtime.pipe.topology import PipelineParallelGrid

from axonn_plugins.config import Axonn, ConfigError
from axonn_plugins.hosts.deepspeed.sections import (
    Refusal,
    enabled,
    needs_whole_matrices,
    of_background,
    of_halves,
    on,
    own_names,
    refuse,
    section,
)

KEY = "axonn.offload_optimizer"


def use(block: Axonn, raw: Mapping[str, Any], mpu: Any) -> Any:
    """`check`, and lead `deepspeed.initialize` to the engine that obeys the key for a model that is no PipelineModule; returns the mpu."""
    check(block, raw, mpu)
    from axonn_plugins.hosts.deepspeed.offload.engine import OffloadEngine

    deepspeed.DeepSpeedEngine = OffloadEngine
    return mpu


def check(block: Axonn, raw: Mapping[str, Any], mpu: Any) -> None:
    """Refuse what the key cannot go with, with the reason.

    Args:
        block: the whole block.
        raw: the whole configuration.
        mpu: the user's model parallel unit, or the pipeline's.

    Raises:
        ConfigError: the first.
    """
    for other in ("tensor_parallel", "samo", "ted"):
        if getattr(block, other) is not None:
            raise ConfigError(f"{KEY} does not go with axonn.{other} yet; leave one of them out")
    if block.pipeline is None and isinstance(mpu, PipelineParallelGrid):
        raise ConfigError(f'{KEY} goes with a PipelineModule under axonn.pipeline only; add "pipeline": {{}} to axonn')
    if mpu is not None and not isinstance(mpu, PipelineParallelGrid):
        raise ConfigError(
            f"{KEY} averages the gradients of weights that every rank holds whole, and deepspeed.initialize was given an mpu, which splits "
            "them; leave one of them out"
        )
    refuse([*_of_state(raw), *of_background(raw), *_of_precision(raw), *_of_others(raw)])


def _of_state(raw: Mapping[str, Any]) -> list[Refusal]:
    zero = section(raw, "zero_optimization")
    stage = zero.get("stage", 0)
    return [
        (
            stage in (1, 2, 3),
            f"zero_optimization.stage = {stage} does not go with {KEY}, which keeps all optimizer state of a rank in host memory; use stage 0, "
            "or zero_optimization.offload_optimizer",
        ),
        (
            on(zero, "offload_optimizer") or on(zero, "offload_param"),
            f"zero_optimization.offload_* is DeepSpeed's own offload, beside {KEY}; remove one of them",
        ),
        (
            section(raw, "checkpoint").get("load_universal", False) is True,
            f"checkpoint.load_universal cannot be read into the state of {KEY}; remove it",
        ),
    ]


def _of_precision(raw: Mapping[str, Any]) -> list[Refusal]:
    own = own_names(raw)
    autocast = section(raw, "torch_autocast")
    given = {
        "data_types.grad_accum_dtype": section(raw, "data_types").get("grad_accum_dtype"),
        "communication_data_type": raw.get("communication_data_type"),
    }
    return [
        *of_halves(raw),
        (
            enabled(raw, "torch_autocast") and autocast.get("dtype") in ("float16", "fp16", "half"),
            f"torch_autocast.dtype = float16 scales the loss beside {KEY}; use bfloat16, or the fp16 section",
        ),
        *[
            (
                value is not None and value not in own,
                f"{key} = {value} does not go with {KEY}, whose gradients have the weights' type; remove it, or use {own[0]}",
            )
            for key, value in given.items()
        ],
    ]


def _of_others(raw: Mapping[str, Any]) -> list[Refusal]:
    optimizer = section(raw, "optimizer")
    kind, settings = str(optimizer.get("type", "")), section(optimizer, "params")
    return [
        (
            needs_whole_matrices(kind),
            f"optimizer.type = {kind} looks at more than one weight at a time, and {KEY} has a part of them at a time; use an "
            "element-wise one such as AdamW",
        ),
        (
            kind.lower() == "lion",
            f"optimizer.type = {kind} is DeepSpeed's own kernel, which {KEY} cannot run in parts; use Adam, AdamW, SGD or Adagrad",
        ),
        (
            settings.get("bias_correction", True) is False,
            f"optimizer.params.bias_correction = false is unknown to torch's Adam, which {KEY} runs; remove it",
        ),
        (
            raw.get("sparse_gradients") is True,
            f"sparse_gradients = true does not go with {KEY}, whose gradients are dense; remove it",
        ),
        (
            section(raw, "tensor_parallel").get("autotp_size", 0) > 1,
            f"tensor_parallel.autotp_size splits weights, which {KEY} needs whole on every rank; remove it",
        ),
        *[
            (enabled(raw, key), f"{key} does not go with {KEY} yet; remove one of them")
            for key in ("expert_parallel", "hybrid_engine")
        ],
        (
            raw.get("sequence_parallel_size", 1) != 1,
            f"sequence_parallel_size does not go with {KEY} yet; remove one of them",
        ),
        (
            section(raw, "compile").get("deepcompile", False) is True,
            f"compile.deepcompile reduces gradients itself; remove it, or {KEY}",
        ),
    ]
