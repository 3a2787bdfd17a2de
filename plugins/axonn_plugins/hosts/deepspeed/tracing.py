"""The part of the engine that writes a Chrome trace of some steps on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from axonn_plugins.config import TensorParallel
from axonn_plugins.hosts.deepspeed.checkpoint.grid import GridCheckpoints
from axonn_plugins.observe.trace import Tracer
from axonn_tp import Mesh


class TracedEngine(GridCheckpoints):
    """Rank 0 records `trace_steps` of the block."""

    _tracer: Tracer | None = None

    def _trace(self, block: TensorParallel, mesh: Mesh) -> None:
        if block.trace_steps is not None and dist.get_rank() == 0:
            first, last = block.trace_steps
            self._tracer = Tracer(first, last, Path(block.trace_folder), mesh.axis_names())

    def _part(self, run: Any, *inputs: Any, **keywords: Any) -> Any:
        if self._tracer is None or not self.module.training:
            return run(*inputs, **keywords)
        with self._tracer.part_of(self.global_steps + 1):
            return run(*inputs, **keywords)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:  # noqa: D102
        return self._part(super().forward, *inputs, **keywords)

    def backward(self, *inputs: Any, **keywords: Any) -> Any:  # noqa: D102
        return self._part(super().backward, *inputs, **keywords)

    def step(self, *inputs: Any, **keywords: Any) -> None:  # noqa: D102
        self._part(super().step, *inputs, **keywords)
        if self._tracer is not None:
            self._tracer.done(self.global_steps)

    def destroy(self) -> None:  # noqa: D102
        if self._tracer is not None:
            self._tracer.close()
        super().destroy()
