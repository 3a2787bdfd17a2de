"""TensorBoard events, where tensorboard is installed: the one place that imports it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

MISSING = 'need tensorboard, which is not installed; run pip install "axonn-plugins[tensorboard]"'


class Events:
    """Event files of a run, opened with the first step; without tensorboard that is said once, on stderr.

    Args:
        folder: where they go.
        purge_step: from this step on, what earlier files say is hidden.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        self._folder, self._purge_step = folder, purge_step
        self._writer: SummaryWriter | None = None
        self._said = False

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write a step's numbers."""
        if self._writer is None:
            if importlib.util.find_spec("tensorboard") is None:
                self._say()
                return
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        for name, value in values.items():
            if name != "step":
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()

    def _say(self) -> None:
        if not self._said:
            print(f"axonn: no TensorBoard events are written: they {MISSING}", file=sys.stderr)
        self._said = True
