"""What the rest of a configuration may be beside ``axonn.samo``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed

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
    refuse_pipeline,
    section,
)


def use(block: Axonn, raw: Mapping[str, Any], mpu: Any) -> Any:
    """`check`, and lead `deepspeed.initialize` to the engine that obeys the key; returns the mpu."""
    check(raw, mpu)
    from axonn_plugins.hosts.deepspeed.samo.engine import SamoEngine

    deepspeed.DeepSpeedEngine = SamoEngine
    return mpu


def check(raw: Mapping[str, Any], mpu: Any) -> None:
    """Refuse DeepSpeed settings that SAMO cannot go with, with the reason.

    Args:
        raw: the whole configuration.
        mpu: the user's model parallel unit, or the pipeline's.

    Raises:
        ConfigError: the first.
    """
    refuse_pipeline("axonn.samo", mpu)
    if mpu is not None:
        raise ConfigError(
            "axonn.samo prunes by weights that every rank holds whole, and deepspeed.initialize was given an mpu, which splits them; "
            "leave one of them out"
        )
    refuse([*_of_zero(section(raw, "zero_optimization")), *_of_precision(raw), *_of_others(raw)])


def _of_zero(zero: Mapping[str, Any]) -> list[Refusal]:
    stage = zero.get("stage", 0)
    return [
        (
            stage in (1, 2, 3),
            f"zero_optimization.stage = {stage} does not go with axonn.samo, which keeps gradients and optimizer state of kept weights only; "
            'use stage 0, and "shard": true in axonn.samo to split that state over the ranks',
        ),
        (
            on(zero, "offload_optimizer"),
            "zero_optimization.offload_optimizer does not go with axonn.samo, whose state stays beside the weights; remove it",
        ),
        (on(zero, "offload_param"), "zero_optimization.offload_param does not go with axonn.samo; remove it"),
        (bool(zero.get("zenflow")), "zero_optimization.zenflow does not go with axonn.samo; remove it"),
    ]


def _of_precision(raw: Mapping[str, Any]) -> list[Refusal]:
    autocast, types = section(raw, "torch_autocast"), section(raw, "data_types")
    accumulated = types.get("grad_accum_dtype")
    own = own_names(raw)
    reduced = raw.get("communication_data_type")
    return [
        *of_halves(raw),
        (
            enabled(raw, "torch_autocast") and autocast.get("dtype") in ("float16", "fp16", "half"),
            "torch_autocast.dtype = float16 would scale the loss a second time beside axonn.samo; use bfloat16, or the fp16 section",
        ),
        (
            accumulated is not None and accumulated not in own,
            f"data_types.grad_accum_dtype = {accumulated} does not go with axonn.samo, which accumulates compressed gradients in the weights' "
            f"type; remove it, or use {own[0]}",
        ),
        (
            reduced is not None and reduced not in own,
            f"communication_data_type = {reduced} does not go with axonn.samo, which reduces compressed gradients in the weights' type; "
            f"remove it, or use {own[0]}",
        ),
    ]


def _of_others(raw: Mapping[str, Any]) -> list[Refusal]:
    optimizer = section(raw, "optimizer")
    kind, settings = str(optimizer.get("type", "")), section(optimizer, "params")
    return [
        (
            needs_whole_matrices(kind),
            f"optimizer.type = {kind} looks at more than one weight at a time, and axonn.samo keeps the state of some of them; use an "
            "element-wise one such as AdamW",
        ),
        (
            kind.lower() == "lion",
            f"optimizer.type = {kind} is DeepSpeed's own kernel, which axonn.samo cannot run in tiles; use Adam, AdamW, SGD or Adagrad",
        ),
        (
            settings.get("bias_correction", True) is False,
            "optimizer.params.bias_correction = false is unknown to torch's Adam, which axonn.samo runs; remove it",
        ),
        (
            raw.get("sparse_gradients") is True,
            "sparse_gradients = true does not go with axonn.samo, which compresses dense gradients; remove it",
        ),
        (
            section(raw, "tensor_parallel").get("autotp_size", 0) > 1,
            "tensor_parallel.autotp_size splits weights, which axonn.samo needs whole on every rank; remove it",
        ),
        (enabled(raw, "expert_parallel"), "expert_parallel does not go with axonn.samo yet; remove one of them"),
        (
            raw.get("sequence_parallel_size", 1) != 1,
            "sequence_parallel_size does not go with axonn.samo yet; remove it",
        ),
        (enabled(raw, "hybrid_engine"), "hybrid_engine has an engine of its own; remove it, or axonn.samo"),
        (
            bool(raw.get("compression_training")),
            "compression_training prunes and quantizes by itself; remove it, or axonn.samo",
        ),
        (
            section(raw, "checkpoint").get("load_universal", False) is True,
            "checkpoint.load_universal cannot be read into compressed state; remove it",
        ),
        (
            section(raw, "compile").get("deepcompile", False) is True,
            "compile.deepcompile reduces gradients itself, uncompressed; remove it, or axonn.samo",
        ),
        *of_background(raw),
    ]
