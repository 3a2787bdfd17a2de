"""Weights that a stock DeepSpeed-MoE engine saved, read into TED's shards of any degrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from axonn_tp.checkpoint import CheckpointError
from axonn_tp.checkpoint.planner import Place
from axonn_tp.checkpoint.ranks import Ranks
from axonn_tp.checkpoint.state import Shards, model_state
from plugins.deepspeed.expert_names import ExpertNames
from plugins.deepspeed.ted_layers import TedMoE

STATES = "model_states.pt"
_OWN = {"module", "optimizer", "lr_scheduler", "global_steps", "global_samples", "skipped_steps", "ds_config"}
_OWN |= {"dp_world_size", "mp_world_size", "num_experts", "buffer_names", "ds_version", "data_sampler"}
_OWN |= {"random_ltd", "sparse_tensor_module_names", "param_shapes", "frozen_param_shapes", "shared_params"}
_OWN |= {"frozen_param_fragments", "ds_autoep_layers", "universal_checkpoint_info", "checkpoint_parallel_dimensions"}


def is_stock(folder: Path) -> bool:
    """Whether a stock engine saved a model with experts there, without tensor parallelism."""
    return bool(list(folder.glob(f"layer_*_expert_*_mp_rank_00_{STATES}"))) and not list(folder.glob("mp_rank_01_*"))


@torch.no_grad()
def read_weights(engine: Any, folder: Path, schedule: bool, counters: bool) -> dict[str, Any]:
    """Read the weights, and what else has nothing to do with degrees; every rank calls it.

    Args:
        engine: a `TedEngine`.
        folder: the checkpoint.
        schedule: with the scheduler's state.
        counters: with the counts of steps and samples.

    Returns:
        The client state.

    Raises:
        CheckpointError: a tensor is missing or of another shape; the same on every rank.
    """
    ranks = Ranks(engine.mesh)
    shards, _ = model_state(engine.module)
    names = ExpertNames(engine.module)
    mine = {names.outward(name.removeprefix("model.")): shard for name, shard in shards.items()}
    state = ranks.together(lambda: _fill(mine, folder, _expert_files(engine, names), ranks.place))
    if hasattr(engine.optimizer, "refresh_fp32_params"):
        engine.optimizer.refresh_fp32_params()
    if counters:
        for name in ("global_steps", "global_samples", "skipped_steps"):
            setattr(engine, name, state[name])
    if schedule and engine.lr_scheduler is not None and state["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    return {key: value for key, value in state.items() if key not in _OWN}


def _expert_files(engine: Any, names: ExpertNames) -> list[str]:
    """Those with this rank's experts."""
    layers = [layer for layer in engine.module.modules() if isinstance(layer, TedMoE)]
    files = []
    for number, layer in enumerate(layers):
        first = layer.groups.rank("expert") * len(layer.local)
        # A layer whose experts have no weights has no files.
        if any(True for _ in layer.local.parameters()):
            files += [f"layer_{number}_expert_{first + place}_mp_rank_00_{STATES}" for place in range(len(layer.local))]
    return files


def _fill(shards: Shards, folder: Path, files: list[str], place: Place) -> dict[str, Any]:
    state = _load(folder / f"mp_rank_00_{STATES}")
    whole: dict[str, Tensor] = dict(state["module"])
    for file in files:
        whole |= _load(folder / file)
    for name, shard in shards.items():
        if name not in whole:
            raise CheckpointError(f"{folder} has no {name}; load it into the model that was saved")
        if tuple(whole[name].shape) != shard.layout.serial_shape:
            raise CheckpointError(
                f"{name} has shape {tuple(whole[name].shape)} in {folder} and {shard.layout.serial_shape} here; load it into the model "
                "that was saved"
            )
    for name, shard in shards.items():
        shard.fill(whole[name], place)
    return state


def _load(file: Path) -> dict[str, Any]:
    try:
        return torch.load(file, map_location="cpu", weights_only=False)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{file} cannot be read: {str(error).splitlines()[0]}") from None
