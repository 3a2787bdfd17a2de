"""The rest of a configuration beside the pipeline, and the engine that it leads to."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from axonn_plugins.config import ConfigError, compose, parse
from axonn_plugins.hosts.deepspeed import config_hook
from axonn_plugins.hosts.deepspeed.pipeline import config as pipeline_config

REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "TP, traced": ({"tensor_parallel": {"trace_steps": [1, 2]}}, {}, ("trace_steps", "record_events")),
    "stage 2": ({}, {"zero_optimization": {"stage": 2}}, ("zero_optimization.stage = 2", "stage 0 or 1")),
    "both halves": ({}, {"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ("turn one off",)),
    "autocast": (
        {},
        {"torch_autocast": {"enabled": True, "dtype": "float16"}},
        ("torch_autocast.dtype", "use bfloat16"),
    ),
    "hybrid": ({}, {"hybrid_engine": {"enabled": True}}, ("hybrid_engine", "remove")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    others, raw, said = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        block = parse({"pipeline": {}, **others})
        compose.check(block)
        pipeline_config.use(block, raw, None)
    assert all(part in str(caught.value) for part in said), caught.value


def test_engines() -> None:
    try:
        pipeline_config.use(parse({"pipeline": {}}), {}, None)
        assert deepspeed.PipelineEngine.__name__ == "MessageDrivenEngine"
        with pytest.raises(ConfigError, match="deepspeed.pipe.PipelineModule"):
            deepspeed.DeepSpeedEngine(model=None)
    finally:
        config_hook.step_aside()
    assert deepspeed.PipelineEngine is PipelineEngine and deepspeed.DeepSpeedEngine is DeepSpeedEngine
