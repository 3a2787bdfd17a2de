"""A pytest plugin under which DeepSpeed's own distributed tests run on the CPU, with a block in every configuration.

AXONN_TESTED_BLOCK is the block as JSON; without it they test stock DeepSpeed. AXONN_TESTED_SAMPLES shortens their loops.
"""

from __future__ import annotations

import json
import os
from typing import Any

import deepspeed
import pytest
import torch.multiprocessing
from deepspeed.accelerator import get_accelerator

_start = torch.multiprocessing.set_start_method
# Ranks are forked, to have what is exchanged here, and need not import everything once more.
torch.multiprocessing.set_start_method = lambda *_, **__: _start("fork", force=True)
type(get_accelerator()).is_fp16_supported = lambda self: True
type(get_accelerator()).device_count = lambda self: 8
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# Where a rank fails and others wait for it, they would end the whole run.
pytest.exit = lambda reason, returncode=None: pytest.fail(reason)  # type: ignore[assignment]

if "AXONN_TESTED_BLOCK" in os.environ:
    import axonn_plugins

    axonn_plugins.activate()
    _initialize = deepspeed.initialize

    def initialize(*inputs: Any, config: Any = None, **keywords: Any) -> Any:
        block = json.loads(os.environ["AXONN_TESTED_BLOCK"])
        return _initialize(*inputs, config={**config, "axonn": block}, **keywords)

    deepspeed.initialize = initialize


def pytest_collection_modifyitems(items: list[Any]) -> None:
    few = int(os.environ.get("AXONN_TESTED_SAMPLES", "0"))
    for module in {item.module for item in items}:
        loader = getattr(module, "sequence_dataloader", None)
        if few and loader is not None:
            module.sequence_dataloader = lambda model, total_samples, *rest, _loader=loader, **keywords: _loader(
                model, min(few, total_samples), *rest, **keywords
            )
