"""Conditions on the rest of a configuration where the optimizer's states are ours: beside ``axonn.samo`` and ``axonn.offload_optimizer``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid

from axonn_plugins.config import Axonn, ConfigError
from axonn_plugins.hosts.common.elementwise import OF_PRUNED, looks_at_whole_matrices
from axonn_plugins.hosts.deepspeed.sections import (
    Refusal,
    divides_alone,
    enabled,
    needs_whole_matrices,
    of_checkpoints,
    of_halves,
    of_optimizer,
    on,
    own_names,
    refuse,
    section,
)

OWNERS = {
    "samo": "keeps gradients and states of kept weights only",
    "offload_optimizer": "keeps float32 weights and optimizer states in host memory",
}
"""Keys whose optimizer is ours, and what it does."""


def owner(block: Axonn, raw: Mapping[str, Any], mpu: Any) -> str | None:
    """The key for which gradients and optimizer states are ours; None: they are DeepSpeed's.

    They are wherever a key cares for them, and where split weights or experts have states to share out or to keep in float32:
    DeepSpeed's optimizers know one group of ranks that holds whole weights. Stages alone are left to DeepSpeed but for what it
    does not compute: fp16 at stage 0, whose loss it does not scale, and float64. That, and whether a model has experts for
    ``ted`` without ``tensor``, is known when there is a model (`take_over`).

    Args:
        block: the block.
        raw: the whole configuration.
        mpu: the user's model parallel unit, or the pipeline's.
    """
    given = [key for key in OWNERS if getattr(block, key) is not None] + list(block.others)
    if given:
        return given[0]
    zero = section(raw, "zero_optimization")
    stage = zero.get("stage", 0)
    splits = [key for key in ("tensor_parallel", "ted") if getattr(block, key) is not None]
    if not splits:
        return "pipeline" if block.pipeline is not None and stage == 0 and enabled(raw, "fp16") else None
    of_script = mpu is not None and block.pipeline is None
    if of_script or _by_model(block) or stage == 3:  # what a script has split, and ZeRO-3, are DeepSpeed's, or refused
        return None
    return splits[0] if has_states(raw) else None


def _by_model(block: Axonn) -> bool:
    """True if ``ted`` splits nothing but experts, so that the model is to say whose the states are."""
    others = (block.tensor_parallel, block.pipeline, *(getattr(block, key) for key in OWNERS), *block.others)
    return block.ted is not None and block.ted.tensor == 1 and all(other is None for other in others)


def may_be_ours(block: Axonn, raw: Mapping[str, Any], mpu: Any) -> bool:
    """True if states are ours where a model has experts, and else DeepSpeed's."""
    return mpu is None and _by_model(block) and has_states(raw)


def has_states(raw: Mapping[str, Any]) -> bool:
    """True if there are states to share out, to keep in float32 or in host memory, or an optimizer that looks at whole matrices."""
    zero = section(raw, "zero_optimization")
    kind = str(section(raw, "optimizer").get("type", ""))
    kept = zero.get("stage", 0) > 0 or enabled(raw, "bf16") or enabled(raw, "fp16") or on(zero, "offload_optimizer")
    return kept or needs_whole_matrices(kind)


def take_over(parsed: Any, key: str) -> None:
    """Have the states be ours after all, now that the model is known.

    Args:
        parsed: DeepSpeed's configuration.
        key: of the block.

    Raises:
        ConfigError: the rest of the configuration does not go with that.
    """
    _check(f"axonn.{key}", "shares states out by weights' own ranks", parsed.axonn, parsed.axonn_raw, None)
    parsed.axonn_owner = key
    parsed.zero_config.stage = parsed.zero_optimization_stage = 0
    parsed.zero_enabled = False
    parsed.grad_accum_dtype = parsed.zero_config.offload_optimizer = None


def take_over_whole(parsed: Any, optimizer: Any) -> bool:
    """The same where the script's optimizer looks at whole matrices, which the block splits: by its name, or by a trial; true if it does.

    Every rank calls it, once all have said that they have an optimizer. Stages of a pipeline may have none of the groups of parameters
    that tell.
    """
    splits = [key for key in ("tensor_parallel", "ted") if getattr(parsed.axonn, key) is not None]
    if optimizer is None or not splits or parsed.axonn_owner is not None:
        return False
    everyone = [False] * dist.get_world_size()
    dist.all_gather_object(everyone, looks_at_whole_matrices(optimizer))
    if any(everyone):
        take_over(parsed, splits[0])
    return any(everyone)


def check(block: Axonn, raw: Mapping[str, Any], mpu: Any) -> None:
    """Refuse what the keys for which states are ours cannot go with, with the reason.

    Args:
        block: the block.
        raw: the whole configuration.
        mpu: the user's model parallel unit, or the pipeline's.

    Raises:
        ConfigError: the first.
    """
    first = owner(block, raw, mpu)
    ours = first is not None or may_be_ours(block, raw, mpu)
    block.require_gather(section(raw, "zero_optimization").get("stage", 0), ours)
    if first is None:
        refuse(_of_unscaled(raw, mpu))
        return
    given = [key for key in OWNERS if getattr(block, key) is not None] + list(block.others)
    for name in given or [first]:
        default = (
            "changes gradients before they are clipped"
            if name in block.others
            else "shares states out by weights' own ranks"
        )
        _check(f"axonn.{name}", OWNERS.get(name, default), block, raw, mpu)


def _check(key: str, does: str, block: Axonn, raw: Mapping[str, Any], mpu: Any) -> None:
    staged = isinstance(mpu, PipelineParallelGrid)
    if staged and block.pipeline is None:
        raise ConfigError(
            f'{key} goes with a PipelineModule under axonn.pipeline only; add "pipeline": {{}} to axonn, or pass a plain torch.nn.Module'
        )
    if mpu is not None and not staged:
        raise ConfigError(
            f"{key} sums the gradients of weights that every rank holds whole, or that this suite has split, and deepspeed.initialize was "
            "given an mpu of the script's own; leave one of them out"
        )
    refuse([*_of_state(key, does, raw), *of_checkpoints(raw), *_of_precision(key, raw), *_of_others(key, raw)])


def _of_unscaled(raw: Mapping[str, Any], mpu: Any) -> list[Refusal]:
    """Steps of a script's own mpu, which DeepSpeed takes: in fp16 without ZeRO by gradients that are too small."""
    scale = section(raw, "fp16").get("loss_scale", 0)
    without_zero = enabled(raw, "fp16") and section(raw, "zero_optimization").get("stage", 0) == 0
    of_script = mpu is not None and not isinstance(mpu, PipelineParallelGrid)
    return [
        (
            of_script and without_zero and scale != 1 and divides_alone(deepspeed.__version__),
            f"fp16.enabled = true at zero_optimization.stage = 0: DeepSpeed {deepspeed.__version__} divides gradients there by a loss scale that it "
            "has not multiplied the loss with; use stage 1, or fp16.loss_scale = 1",
        )
    ]


def _of_state(key: str, does: str, raw: Mapping[str, Any]) -> list[Refusal]:
    zero = section(raw, "zero_optimization")
    return [
        (
            zero.get("stage", 0) == 3,
            f"zero_optimization.stage = 3 gathers and frees weights itself, and {key} {does}; use stage 0, 1 or 2, and "
            "axonn.tensor_parallel.gz to split weights",
        ),
        (
            on(zero, "offload_param"),
            f"zero_optimization.offload_param belongs to ZeRO-3, which gathers and frees weights itself, and {key} {does}; remove it",
        ),
        (
            on(zero, "offload_optimizer") and key == "axonn.offload_optimizer",
            f"zero_optimization.offload_optimizer is DeepSpeed's own offload, and {key} {does}; remove one of them",
        ),
        (
            section(zero, "offload_optimizer").get("device") == "nvme",
            f"zero_optimization.offload_optimizer.device = nvme is beyond host memory, where {key} can keep states; use cpu",
        ),
        *[
            (bool(zero.get(name)), f"zero_optimization.{name} rounds what travels, which {key} does not; remove it")
            for name in ("zero_quantized_gradients", "zero_quantized_weights")
        ],
        *[
            (
                bool(section(raw, half).get(name)),
                f"{half}.{name} keeps masters or states in 16 bits, and {key} keeps them in float32; remove it",
            )
            for half, name in (
                ("fp16", "fp16_master_weights_and_grads"),
                ("bf16", "bf16_master_weights_and_grads"),
                ("bf16", "bf16_optimizer_states"),
            )
        ],
        (bool(zero.get("zenflow")), f"zero_optimization.zenflow is an optimizer of its own; remove it, or {key}"),
        (
            section(raw, "checkpoint").get("load_universal", False) is True,
            f"checkpoint.load_universal cannot be read into the states of {key}; remove it",
        ),
    ]


def _of_precision(key: str, raw: Mapping[str, Any]) -> list[Refusal]:
    own, autocast = own_names(raw), section(raw, "torch_autocast")
    sums, single = section(raw, "data_types").get("grad_accum_dtype"), ("fp32", "float32")
    known = {
        "data_types.grad_accum_dtype": (sums, {*own, *single}),
        "communication_data_type": (raw.get("communication_data_type"), single if sums in single else own),
    }
    return [
        *of_halves(raw),
        (
            enabled(raw, "torch_autocast") and autocast.get("dtype") in ("float16", "fp16", "half"),
            f"torch_autocast.dtype = float16 would scale the loss a second time beside {key}; use bfloat16, or the fp16 section",
        ),
        *[
            (
                value is not None and value not in allowed,
                f"{name} = {value} does not go with {key}, which sums gradients in the type in which they are accumulated: the weights', "
                f"{own[0]}, or float32 (data_types.grad_accum_dtype); remove it",
            )
            for name, (value, allowed) in known.items()
        ],
    ]


def _of_others(key: str, raw: Mapping[str, Any]) -> list[Refusal]:
    optimizer = section(raw, "optimizer")
    kind, settings = str(optimizer.get("type", "")), section(optimizer, "params")
    return [
        *of_optimizer(kind),
        (
            key == "axonn.samo" and needs_whole_matrices(kind),
            f"optimizer.type = {kind} {OF_PRUNED}; use an element-wise one such as AdamW",
        ),
        (
            kind.lower() == "lion",
            f"optimizer.type = {kind} is DeepSpeed's own kernel, which {key} cannot run in tiles; use Adam, AdamW, SGD or Adagrad",
        ),
        (
            kind.lower() in ("adam", "adamw") and not settings.get("bias_correction", True),
            f"optimizer.params.bias_correction = false is unknown to torch's Adam, which {key} runs; remove it",
        ),
        (
            raw.get("sparse_gradients") is True,
            f"sparse_gradients = true does not go with {key}, whose gradients are dense; remove it",
        ),
        (
            section(raw, "tensor_parallel").get("autotp_size", 0) not in (0, 1),
            f"tensor_parallel.autotp_size has DeepSpeed split weights, of which {key} does not know the parts; use axonn.tensor_parallel",
        ),
        (
            enabled(raw, "expert_parallel"),
            f"expert_parallel has DeepSpeed place experts, of which {key} does not know the groups; use axonn.ted",
        ),
        (
            raw.get("sequence_parallel_size", 1) != 1,
            f"sequence_parallel_size has DeepSpeed sum gradients over groups that {key} does not know; use axonn.tensor_parallel.gz.sequence",
        ),
        (enabled(raw, "hybrid_engine"), f"hybrid_engine has an engine of its own; remove it, or {key}"),
        (
            bool(raw.get("compression_training")),
            f"compression_training prunes and quantizes by itself; remove it, or {key}",
        ),
        (
            section(raw, "compile").get("deepcompile", False) is True,
            f"compile.deepcompile reduces gradients itself; remove it, or {key}",
        ),
    ]
