"""Conditions on the rest of a configuration beside ``axonn.tensor_parallel``, and the grid that it makes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch.distributed as dist

from axonn_plugins.config import Axonn, ConfigError, TensorParallel, batch
from axonn_plugins.hosts.deepspeed.sections import (
    Refusal,
    enabled,
    of_checkpoints,
    of_halves,
    of_optimizer,
    on,
    refuse,
    refuse_pipeline,
    section,
)
from axonn_tp import Grid


class BatchRanks:
    """Stands in for an mpu while the configuration is parsed: only the number of ranks that read different data."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def get_data_parallel_world_size(self) -> int:
        """Number of ranks that read different data."""
        return self.grid.readers


def use(block: Axonn, raw: Mapping[str, Any], mpu: Any) -> BatchRanks:
    """Check a configuration with the key, and lead `deepspeed.initialize` to the engine that obeys it; see `config_hook.configure`."""
    settings = block.tensor_parallel
    assert settings is not None
    automatic = len(settings.given) < 3
    grid = stand_in(raw) if automatic else grid_for(settings, world_size())
    refuse_pipeline("axonn.tensor_parallel", mpu)
    if mpu is not None:
        raise ConfigError(
            "axonn.tensor_parallel makes its own groups, and deepspeed.initialize was given an mpu; leave one of them out"
        )
    check(raw, grid)
    if automatic:
        check_automatic(settings, raw)
    from axonn_plugins.hosts.deepspeed.engine import AxonnEngine

    deepspeed.DeepSpeedEngine = AxonnEngine
    return BatchRanks(grid)


def world_size() -> int:
    """Ranks of this run, known before any group exists."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def grid_for(block: TensorParallel, world: int) -> Grid:
    """The grid that the block asks for.

    Raises:
        ConfigError: its sizes do not divide the ranks.
    """
    try:
        return Grid.for_world(world, **block.given, sequence=block.sequence)
    except ValueError as error:
        raise ConfigError(f"axonn.tensor_parallel: {error}") from None


def check_automatic(block: TensorParallel, raw: Mapping[str, Any]) -> None:
    """Refuse what leaves sizes that are "auto" open.

    Raises:
        ConfigError: the first.
    """
    if raw.get("train_batch_size") is None:
        raise ConfigError(
            'axonn.tensor_parallel has sizes that are "auto", which leave open how many ranks read different data; give train_batch_size, '
            "so that what is learned does not depend on the choice"
        )
    if block.machine is not None:
        from axonn_plugins.planner import machine

        machine.load(block.machine, "axonn.tensor_parallel.machine")


def stand_in(raw: Mapping[str, Any]) -> Grid:
    """While sizes are "auto": a grid on which DeepSpeed's batch arithmetic comes out; the engine parses again with the one chosen."""
    keys = batch.KEYS
    numbers = [number for key in keys if isinstance(number := raw.get(key), int) and number > 0]
    if len(numbers) < len(keys):
        return Grid()
    total, micro, steps = numbers
    return Grid(gdata=max(total // (micro * steps), 1))


def check(raw: Mapping[str, Any], grid: Grid) -> None:
    """Refuse DeepSpeed settings that the block cannot go with, with the reason.

    Raises:
        ConfigError: the first.
    """
    zero = section(raw, "zero_optimization")
    refuse([*_of_zero(zero), *_of_precision(raw), *_of_others(raw), *_of_checkpoints(raw)])
    batch.check(raw, grid.gz, grid.gdata, grid.sequence)


def _of_zero(zero: Mapping[str, Any]) -> list[Refusal]:
    stage = zero.get("stage", 0)
    return [
        (
            stage == 3,
            "zero_optimization.stage = 3 does not go with axonn.tensor_parallel, whose z axis splits the weights in the same way; "
            "use stage 0, 1 or 2 and make gz larger",
        ),
        (
            on(zero, "offload_param"),
            "zero_optimization.offload_param belongs to ZeRO-3, which axonn.tensor_parallel replaces; remove it",
        ),
        (bool(zero.get("zenflow")), "zero_optimization.zenflow is not supported with axonn.tensor_parallel; remove it"),
        (
            bool(zero.get("zero_quantized_gradients")) or bool(zero.get("zero_quantized_weights")),
            "zero_optimization.zero_quantized_* would change results under axonn.tensor_parallel; remove it",
        ),
    ]


def _of_precision(raw: Mapping[str, Any]) -> list[Refusal]:
    autocast, travels = section(raw, "torch_autocast").get("dtype"), raw.get("communication_data_type")
    whole = not (section(raw, "zero_optimization").get("stage", 0) or enabled(raw, "bf16") or enabled(raw, "fp16"))
    return [
        *of_halves(raw),
        (
            whole and travels not in (None, "fp32"),
            f"communication_data_type = {travels} does not go with axonn.tensor_parallel, which sums gradients in the weights' type; remove it",
        ),
        (
            enabled(raw, "torch_autocast") and autocast in ("float16", "fp16", "half"),
            "torch_autocast.dtype = float16 scales the loss on each rank by itself; use bfloat16, or the fp16 section",
        ),
    ]


def _of_others(raw: Mapping[str, Any]) -> list[Refusal]:
    optimizer = section(raw, "optimizer").get("type")
    return [
        (
            section(raw, "tensor_parallel").get("autotp_size", 0) not in (0, 1),
            "tensor_parallel.autotp_size is DeepSpeed's own tensor parallelism; remove it, or the axonn block",
        ),
        (
            enabled(raw, "expert_parallel"),
            "expert_parallel has DeepSpeed place experts, of which axonn.tensor_parallel does not know the groups; remove it, and leave experts to axonn.ted",
        ),
        (
            raw.get("sequence_parallel_size", 1) != 1,
            "sequence_parallel_size does not go with axonn.tensor_parallel, which splits tokens over z; remove it",
        ),
        (enabled(raw, "hybrid_engine"), "hybrid_engine has an engine of its own; remove it, or the axonn block"),
        (
            section(raw, "compile").get("deepcompile", False) is True,
            "compile.deepcompile does not go with axonn.tensor_parallel; remove it",
        ),
        (
            enabled(raw, "elasticity"),
            'elasticity chooses batch sizes by its own list; remove it, give train_batch_size, and leave gx, gy and gz "auto": '
            "axonn_plugins.hosts.deepspeed.elastic goes on with the ranks that are left",
        ),
        *of_optimizer(str(optimizer or "")),
    ]


def _of_checkpoints(raw: Mapping[str, Any]) -> list[Refusal]:
    return [
        (
            section(raw, "checkpoint").get("load_universal", False) is True,
            "checkpoint.load_universal cannot be read into weights split over x, y and z; remove it",
        ),
        *of_checkpoints(raw),
    ]
