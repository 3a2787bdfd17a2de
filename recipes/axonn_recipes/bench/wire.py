"""The backend of a benchmark's collectives, the same for all its sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The collectives of all sides.

    Attributes:
        backend: of every side's groups: gloo, which is NCCL on GPUs, or pccl.
    """

    backend: Literal["gloo", "pccl"] = "gloo"

    @property
    def wire(self) -> str:
        """The backend as torch.distributed names it, on this machine."""
        return "nccl" if self.backend == "gloo" and torch.cuda.is_available() else self.backend
