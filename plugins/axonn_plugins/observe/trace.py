"""A Chrome trace of some steps by torch.profiler, collectives under their axes' names; open it in ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from axonn_plugins.observe.ledger import Ledger


def trace_file(folder: Path, rank: int) -> Path:
    """Where a rank's trace is."""
    return folder / f"trace-rank{rank}.json"


class Tracer:
    """Records steps `first` to `last` of this rank, and writes ``trace-rankN.json`` when the last is done.

    Args:
        first: the first step, counted from 1.
        last: the last step.
        folder: where the file goes; made where it is missing.
        axes: axis by torch's name of its group, from `Mesh.axis_names`.
    """

    def __init__(self, first: int, last: int, folder: Path, axes: Mapping[str, str]) -> None:
        self.first, self.last, self.folder, self.axes = first, last, folder, axes
        self._profile: profile | None = None
        self._written = False

    @contextmanager
    def part_of(self, step: int) -> Iterator[None]:
        """Around any part of a step, such as its forward pass."""
        if self._profile is None and not self._written and self.first <= step <= self.last:
            cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *cuda])
            self._profile.start()
        if self._profile is None:
            yield
            return
        # Entered anew for each part: modes must leave in the order they came, and others come and go between.
        with Ledger(self.axes):
            yield

    def done(self, step: int) -> None:
        """A step has ended."""
        if step >= self.last:
            self.close()

    def close(self) -> None:
        """Write what was recorded, if anything was."""
        if self._profile is None:
            return
        self._profile.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(trace_file(self.folder, dist.get_rank())))
        self._profile, self._written = None, True
