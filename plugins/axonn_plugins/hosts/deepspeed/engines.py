"""Which engine `deepspeed.initialize` makes under a block, after the rest of the configuration was checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed

from axonn_plugins.config import Axonn
from axonn_plugins.hosts.deepspeed import labels, states_config


def use(block: Axonn, raw: Mapping[str, Any], mpu: Any) -> Any:
    """Check a configuration, and lead `deepspeed.initialize` to the engine that obeys the block.

    Args:
        block: has a key of a system.
        raw: the whole configuration.
        mpu: the user's model parallel unit, or the pipeline's.

    Returns:
        The mpu with which DeepSpeed should do its batch arithmetic.

    Raises:
        ConfigError: the first mistake.
    """
    states_config.check(block, raw, mpu)
    labels.check(block, raw, mpu)
    if block.pipeline is not None:
        from axonn_plugins.hosts.deepspeed.pipeline import config as of_pipeline

        return of_pipeline.use(block, raw, mpu)
    if block.ted is not None:
        from axonn_plugins.hosts.deepspeed.ted import config as of_experts

        return of_experts.use(block, raw, mpu)
    if block.tensor_parallel is not None:
        from axonn_plugins.hosts.deepspeed.tensor import config as of_tensors

        return of_tensors.use(block, raw, mpu)
    if states_config.owner(block, raw, mpu) is None:
        from axonn_plugins.hosts.deepspeed.goldfish import GoldfishEngine

        deepspeed.DeepSpeedEngine = GoldfishEngine
        return mpu
    from axonn_plugins.hosts.deepspeed.engine import AxonnEngine

    deepspeed.DeepSpeedEngine = AxonnEngine
    return mpu
