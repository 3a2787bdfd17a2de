"""Checkpoints of stock DeepSpeed's that are not read, and the reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from axonn_plugins.hosts.deepspeed.sections import divides_alone
from axonn_tp.checkpoint import CheckpointError

STATES = "mp_rank_00_model_states.pt"
WEIGHTS_ALONE = "pass load_optimizer_states=False for the weights alone"


def why_unreadable(folder: Path) -> str | None:
    """Why no stock engine's whole weights are there, and what to do; None where they are.

    Args:
        folder: a checkpoint without files of ours.
    """
    if any(folder.glob("mp_rank_01_*")):
        return "was written with tensor parallelism or stages of another engine, a share of the weights on each rank; load it there"
    if any(folder.glob("layer_*-model_states.pt")):
        return "was written by a PipelineModule, whose files go by layers; load it under a PipelineModule"
    if any(folder.glob("*zero_pp_rank_0_mp_rank_00_model_states.pt")):
        return (
            "was written at ZeRO-3, in pieces for its ranks; make whole weights by the zero_to_fp32.py beside it, and give them to "
            "engine.module.load_state_dict"
        )
    if not (folder / STATES).is_file():
        return f"has neither the folder axonn nor {STATES}; correct the folder or the tag"
    return None


def check_scale(folder: Path, version: str, optimizer: dict[str, Any]) -> None:
    """Refuse states of gradients that were divided by a loss scale without having been multiplied with it.

    Args:
        folder: the checkpoint.
        version: of the DeepSpeed that saved it.
        optimizer: the states that it saved of a half-precision optimizer without ZeRO.

    Raises:
        CheckpointError: the states are such.
    """
    if (scale := optimizer.get("cur_scale", 1)) != 1 and divides_alone(version):
        raise CheckpointError(
            f"the optimizer in {folder} has states of gradients that were too small, in the end {scale:g} times: DeepSpeed {version} in "
            f"fp16 without ZeRO divides by a loss scale that it has not multiplied with; save at ZeRO-1 from the start, or {WEIGHTS_ALONE}"
        )
