"""What the rest of a configuration may be where the optimizer's states are ours: beside ``axonn.samo`` and ``axonn.offload_optimizer``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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

OWNERS = {
    "samo": "keeps gradients and states of kept weights only",
    "offload_optimizer": "keeps float32 weights and optimizer states in host memory",
}
"""Keys whose optimizer is ours, and what it does."""


def owner(block: Axonn, stage: int) -> str | None:
    """The key for which gradients and optimizer states are ours at a stage of ZeRO; None: they are DeepSpeed's.

    DeepSpeed's sharding of states knows neither experts beside split weights nor split weights in a pipeline.
    """
    given = [key for key in OWNERS if getattr(block, key) is not None] + list(block.others)
    if given:
        return given[0]
    splits = [key for key in ("tensor_parallel", "ted") if getattr(block, key) is not None]
    apart = len(splits) == 2 or (bool(splits) and block.pipeline is not None)
    return splits[0] if stage > 0 and apart else None


def check(block: Axonn, raw: Mapping[str, Any], mpu: Any) -> None:
    """Refuse what the keys for which states are ours cannot go with, with the reason.

    Args:
        block: the block.
        raw: the whole configuration.
        mpu: the user's model parallel unit, or the pipeline's.

    Raises:
        ConfigError: the first.
    """
    first = owner(block, section(raw, "zero_optimization").get("stage", 0))
    if first is None:
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
    refuse([*_of_state(key, does, raw), *of_background(raw), *_of_precision(key, raw), *_of_others(key, raw)])


def _of_state(key: str, does: str, raw: Mapping[str, Any]) -> list[Refusal]:
    zero = section(raw, "zero_optimization")
    return [
        (
            zero.get("stage", 0) == 3,
            f"zero_optimization.stage = 3 gathers and frees weights itself, and {key} {does}; use stage 0, 1 or 2, and "
            "axonn.tensor_parallel.gz to split weights",
        ),
        *[
            (
                on(zero, name),
                f"zero_optimization.{name} is DeepSpeed's own offload, and {key} {does}; remove one of them",
            )
            for name in ("offload_optimizer", "offload_param")
        ],
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
    given = {
        "data_types.grad_accum_dtype": section(raw, "data_types").get("grad_accum_dtype"),
        "communication_data_type": raw.get("communication_data_type"),
    }
    return [
        *of_halves(raw),
        (
            enabled(raw, "torch_autocast") and autocast.get("dtype") in ("float16", "fp16", "half"),
            f"torch_autocast.dtype = float16 would scale the loss a second time beside {key}; use bfloat16, or the fp16 section",
        ),
        *[
            (
                value is not None and value not in own,
                f"{name} = {value} does not go with {key}, whose gradients have the weights' type; remove it, or use {own[0]}",
            )
            for name, value in given.items()
        ],
    ]


def _of_others(key: str, raw: Mapping[str, Any]) -> list[Refusal]:
    optimizer = section(raw, "optimizer")
    kind, settings = str(optimizer.get("type", "")), section(optimizer, "params")
    return [
        (
            needs_whole_matrices(kind),
            f"optimizer.type = {kind} looks at more than one weight at a time, and {key} has a part of them at a time; use an "
            "element-wise one such as AdamW",
        ),
        (
            kind.lower() == "lion",
            f"optimizer.type = {kind} is DeepSpeed's own kernel, which {key} cannot run in tiles; use Adam, AdamW, SGD or Adagrad",
        ),
        (
            settings.get("bias_correction", True) is False,
            f"optimizer.params.bias_correction = false is unknown to torch's Adam, which {key} runs; remove it",
        ),
        (
            raw.get("sparse_gradients") is True,
            f"sparse_gradients = true does not go with {key}, whose gradients are dense; remove it",
        ),
        (
            section(raw, "tensor_parallel").get("autotp_size", 0) > 1,
            f"tensor_parallel.autotp_size has DeepSpeed split weights, of which {key} does not know the parts; use axonn.tensor_parallel",
        ),
        (
            enabled(raw, "expert_parallel"),
            f"expert_parallel has DeepSpeed place experts, of which {key} does not know the groups; use axonn.ted",
        ),
        (
            raw.get("sequence_parallel_size", 1) != 1,
            f"sequence_parallel_size has DeepSpeed sum gradients over groups that {key} does not know; use axonn.tensor_parallel.gz",
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
