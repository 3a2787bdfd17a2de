"""Reading a DeepSpeed configuration, and what several keys of the ``"axonn"`` block refuse in it alike."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.topology import PipelineParallelGrid

from axonn_plugins.config import ConfigError, training
from axonn_plugins.hosts.common.elementwise import needs_whole_matrices as needs_whole_matrices
from axonn_plugins.optim.by_parameter import reason_against

Refusal = tuple[bool, str]
"""A pair: true if a setting is refused, and the sentence that says so."""


_OBJECTS = (
    "fp16 bf16 bfloat16 amp data_types zero_optimization aio autotuning activation_checkpointing checkpoint flops_profiler "
    "sparse_attention tensorboard wandb csv_monitor comms_logger elasticity compression_training data_efficiency curriculum_learning pipeline"
).split()
"""Keys of DeepSpeed's whose values are objects."""


def section(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A section of the configuration; empty where there is none."""
    found = raw.get(key)
    return found if isinstance(found, Mapping) else {}


def enabled(raw: Mapping[str, Any], key: str) -> bool:
    """True if a section says that it is on."""
    return section(raw, key).get("enabled", False) is True


def on(zero: Mapping[str, Any], key: str) -> bool:
    """True if state is kept elsewhere than on the device."""
    return section(zero, key).get("device", "none") != "none"


def refuse(refusals: Iterable[Refusal]) -> None:
    """Raise the first.

    Raises:
        ConfigError: one of them holds.
    """
    for refused, reason in refusals:
        if refused:
            raise ConfigError(reason)


def refuse_pipeline(key: str, mpu: Any) -> None:
    """Refuse a PipelineModule without ``axonn.pipeline``.

    Args:
        key: of the block.
        mpu: the unit, which a PipelineModule's stands in for.

    Raises:
        ConfigError: it is one.
    """
    if isinstance(mpu, PipelineParallelGrid):
        raise ConfigError(
            f'{key} does not go with a PipelineModule without axonn.pipeline; add "pipeline": {{}} to axonn, or pass a plain torch.nn.Module'
        )


def of_halves(raw: Mapping[str, Any]) -> list[Refusal]:
    """Both half precisions at once, and one that the device lacks."""
    accelerator = get_accelerator()
    supported = {"fp16": accelerator.is_fp16_supported, "bf16": accelerator.is_bf16_supported}
    return [
        (all(enabled(raw, half) for half in supported), "fp16.enabled and bf16.enabled are both true; turn one off"),
        *[
            (
                enabled(raw, half) and not known(),
                f"{half}.enabled = true, but DeepSpeed finds no {half} on this device ({accelerator.device_name()}); use another precision",
            )
            for half, known in supported.items()
        ],
    ]


def of_old_forms(raw: Mapping[str, Any]) -> list[Refusal]:
    """Refusals of names that DeepSpeed has given up but still reads, which the checks of the block would not see, and of values of other kinds."""
    zero = raw.get("zero_optimization")
    stage = section(raw, "zero_optimization").get("stage", 0)
    old = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
    return [
        (
            isinstance(zero, bool),
            f"zero_optimization = {json.dumps(zero)} is DeepSpeed's old form; write "
            + json.dumps({"stage": int(zero is True)}),
        ),
        *[
            (
                key in section(raw, "zero_optimization"),
                f"zero_optimization.{key} is DeepSpeed's old name; write "
                + (
                    f'"{new}": {{"device": "cpu"}}, or leave it out'
                    if section(raw, "zero_optimization").get(key)
                    else "nothing"
                ),
            )
            for key, new in old.items()
        ],
        *[
            (
                not isinstance(raw.get(key, {}), Mapping | None),
                f"{key} = {json.dumps(raw.get(key), default=str)} is not an object; write it in braces",
            )
            for key in _OBJECTS
        ],
        *[(True, mistake) for mistake in training.mistakes(raw)],
        (
            isinstance(stage, bool) or stage not in (0, 1, 2, 3),
            f"zero_optimization.stage = {json.dumps(stage, default=str)} is not 0, 1, 2 or 3; correct it",
        ),
        (
            "cpu_offload" in raw,
            "cpu_offload is DeepSpeed's old name, which it does not read; write "
            '"offload_optimizer": {"device": "cpu"} in zero_optimization, or leave it out',
        ),
    ]


def own_names(raw: Mapping[str, Any]) -> tuple[str, str]:
    """DeepSpeed's names of the weights' type."""
    names = {"fp16": ("fp16", "float16"), "bf16": ("bf16", "bfloat16")}
    return next((name for half, name in names.items() if enabled(raw, half)), ("fp32", "float32"))


def divides_alone(version: str) -> bool:
    """True if this DeepSpeed, in fp16 without ZeRO, divides gradients by a loss scale that it has not multiplied the loss with.

    Since 0.18.3 its ``engine.backward`` scales the loss for ZeRO's optimizers alone, while FP16_Optimizer and
    FP16_UnfusedOptimizer divide as before. Adam hides it, as moments that are all too small give the same steps, until its ``eps``,
    clipping or gradients of another size come in.
    """
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3]) >= (0, 18, 3)


def of_optimizer(kind: str) -> list[Refusal]:
    """An optimizer that cannot step parameters one by one."""
    against = reason_against(kind)
    return [
        (
            against is not None,
            f"optimizer.type = {kind} {against}, and no rank has all of them; use AdamW, Muon, Lamb or another of torch's",
        )
    ]


def of_checkpoints(raw: Mapping[str, Any]) -> list[Refusal]:
    """Checkpoints that are not complete when they get their name: written while training goes on, or in a folder of each node."""
    given = {
        "nebula": enabled(raw, "nebula"),
        "datastates_ckpt": raw.get("datastates_ckpt", False) is not False,  # as DeepSpeed, also where it is empty
        "checkpoint.writer": section(raw, "checkpoint").get("writer") is not None,
    }
    return [
        (
            bool(section(raw, "checkpoint").get("use_node_local_storage")),
            "checkpoint.use_node_local_storage = true has each node keep files of its own, and a checkpoint of the axonn block is one folder, verified "
            "as a whole; remove it, and save where all ranks see the folder",
        ),
    ] + [
        (
            value,
            f"{key} writes checkpoints in the background, where they could not be renamed when complete; remove it",
        )
        for key, value in given.items()
    ]
