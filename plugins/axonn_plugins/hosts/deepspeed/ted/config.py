"""Conditions on the rest of a configuration beside ``axonn.ted``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
from deepspeed.runtime.constants import USE_DATA_BEFORE_EXPERT_PARALLEL

from axonn_plugins.config import Axonn, ConfigError, Ted
from axonn_plugins.hosts.deepspeed.sections import enabled, of_checkpoints, refuse, refuse_pipeline, section
from axonn_plugins.hosts.deepspeed.tensor import config as tensor_config
from axonn_tp import Grid
from ted_moe import Topology


def use(block: Axonn, raw: Mapping[str, Any], mpu: Any) -> Any:
    """Check a configuration with the key, and lead `deepspeed.initialize` to the engine that obeys it; see `config_hook.configure`."""
    assert block.ted is not None
    refuse_pipeline("axonn.ted", mpu)
    hybrid = "hybrid_engine has an engine of its own; remove it, or axonn.ted"
    refuse([*of_checkpoints(raw), (enabled(raw, "hybrid_engine"), hybrid)])
    if block.tensor_parallel is None:
        mpu = _unit(block.ted, raw, mpu)
    else:
        check_experts(raw)
        mpu = tensor_config.use(block, raw, mpu)
    from axonn_plugins.hosts.deepspeed.ted.engine import TedEngine

    deepspeed.DeepSpeedEngine = TedEngine
    return mpu


def _unit(block: Ted, raw: Mapping[str, Any], mpu: Any) -> Any:
    if block.tensor == 1:
        return mpu
    if mpu is not None:
        raise ConfigError(
            "axonn.ted.tensor makes its own groups, and deepspeed.initialize was given an mpu; leave tensor out, and TED uses the mpu's"
        )
    try:
        grid = Grid.for_world(Topology(tensor_config.world_size(), block.tensor).world, gx=block.tensor)
    except ValueError as error:
        raise ConfigError(f"axonn.ted.{error}") from None
    check_rest(raw, grid)
    return tensor_config.BatchRanks(grid)


def check_experts(raw: Mapping[str, Any]) -> None:
    """Refuse what would sum experts' gradients over the wrong ranks in ZeRO-1 and 2, or have experts on other ranks than TED's.

    Raises:
        ConfigError: the first.
    """
    if raw.get(USE_DATA_BEFORE_EXPERT_PARALLEL):
        raise ConfigError(
            f"{USE_DATA_BEFORE_EXPERT_PARALLEL} = true has other ranks share an expert than axonn.ted, whose expert ranks are neighbours; "
            "remove it"
        )
    zero = section(raw, "zero_optimization")
    for key in ("contiguous_gradients", "reduce_scatter"):
        if zero.get("stage", 0) in (1, 2) and zero.get(key) is False:
            raise ConfigError(
                f"zero_optimization.{key} = false does not go with experts, whose gradients DeepSpeed would not keep apart; remove it"
            )


def check_rest(raw: Mapping[str, Any], grid: Grid) -> None:
    """Refuse settings that TED's engine does not have.

    Raises:
        ConfigError: the first.
    """
    stage = section(raw, "zero_optimization").get("stage", 0)
    if stage == 3:
        raise ConfigError(
            "zero_optimization.stage = 3 does not go with axonn.ted, as with DeepSpeed's experts; use stage 0, 1 or 2"
        )
    try:
        tensor_config.check(raw, grid)
    except ConfigError as error:
        raise ConfigError(str(error).replace("axonn.tensor_parallel", "axonn.ted")) from None
