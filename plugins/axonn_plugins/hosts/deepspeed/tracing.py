"""A Chrome trace of some steps of an engine, on request."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist

from axonn_plugins.config import TensorParallel
from axonn_plugins.observe.trace import Tracer


def trace(engine: Any, block: TensorParallel) -> Tracer | None:
    """Have rank 0 record `trace_steps` of the block: its forward, backward and step then run inside the tracer.

    Returns:
        What records; close it in the end. None where nothing is asked for.
    """
    if block.trace_steps is None or dist.get_rank():
        return None
    first, last = block.trace_steps
    tracer = Tracer(first, last, Path(block.trace_folder), engine.mesh.axis_names())

    def recorded(run: Any) -> Any:
        @wraps(run)
        def part(*inputs: Any, **keywords: Any) -> Any:
            if not engine.module.training:
                return run(*inputs, **keywords)
            with tracer.part_of(engine.global_steps + 1):
                return run(*inputs, **keywords)

        return part

    take_step = recorded(engine.step)

    def step(*inputs: Any, **keywords: Any) -> None:
        take_step(*inputs, **keywords)
        tracer.done(engine.global_steps)

    engine.forward, engine.backward, engine.step = recorded(engine.forward), recorded(engine.backward), step
    return tracer
