"""What the rest of a configuration may be beside ``axonn.samo``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.topology import PipelineParallelGrid

from plugins.config import ConfigError
from plugins.deepspeed.config_hook import enabled, forget_unit, needs_whole_matrices, on, section


def engine() -> type[DeepSpeedEngine]:
    """The engine that obeys the block."""
    from plugins.deepspeed.samo_engine import SamoEngine

    forget_unit()
    return SamoEngine


def check(raw: Mapping[str, Any], mpu: Any) -> None:
    """Refuse DeepSpeed settings that SAMO cannot go with, with the reason.

    Args:
        raw: the whole configuration.
        mpu: the user's model parallel unit, or the pipeline's.

    Raises:
        ConfigError: the first.
    """
    if isinstance(mpu, PipelineParallelGrid):
        raise ConfigError(
            "axonn.samo does not go with a PipelineModule yet; leave the block out, or pass a plain torch.nn.Module"
        )
    if mpu is not None:
        raise ConfigError(
            "axonn.samo prunes by weights that every rank holds whole, and deepspeed.initialize was given an mpu, which splits them; "
            "leave one of them out"
        )
    zero, halves = section(raw, "zero_optimization"), (enabled(raw, "fp16"), enabled(raw, "bf16"))
    for refused, reason in (*_of_zero(zero), *_of_precision(raw, halves), *_of_others(raw)):
        if refused:
            raise ConfigError(reason)


def _of_zero(zero: Mapping[str, Any]) -> list[tuple[bool, str]]:
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


def _of_precision(raw: Mapping[str, Any], halves: tuple[bool, bool]) -> list[tuple[bool, str]]:
    accelerator = get_accelerator()
    autocast, types = section(raw, "torch_autocast"), section(raw, "data_types")
    accumulated = types.get("grad_accum_dtype")
    own = (("fp16", "float16"), ("bf16", "bfloat16"))[halves[1]] if any(halves) else ("fp32", "float32")
    reduced = raw.get("communication_data_type")
    return [
        (all(halves), "fp16.enabled and bf16.enabled are both true; turn one off"),
        *[
            (
                on_now and not supported(),
                f"{half}.enabled = true, but DeepSpeed finds no {half} on this device ({accelerator.device_name()}); use another precision",
            )
            for half, on_now, supported in (
                ("fp16", halves[0], accelerator.is_fp16_supported),
                ("bf16", halves[1], accelerator.is_bf16_supported),
            )
        ],
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


def _of_others(raw: Mapping[str, Any]) -> list[tuple[bool, str]]:
    optimizer = section(raw, "optimizer")
    kind, settings = str(optimizer.get("type", "")), section(optimizer, "params")
    backgrounds = (
        ("nebula", raw.get("nebula")),
        ("datastates_ckpt", raw.get("datastates_ckpt")),
        ("checkpoint.writer", section(raw, "checkpoint").get("writer")),
    )
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
        *[
            (
                bool(given),
                f"{key} writes checkpoints in the background, where they could not be renamed when complete; remove it",
            )
            for key, given in backgrounds
        ],
    ]
