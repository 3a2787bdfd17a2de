"""Megatron-LM's pretrain_gpt.py with systems of one's own, which are registered by their import: what a user writes."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import torch
import torch.distributed as dist
from pydantic import Field

from axonn_plugins.config.base import Block
from axonn_plugins.hosts.host import Host, System
from tests.compose.noise import GradientNoise
from tests.megatron.harness import CHECKOUT


class JournalBlock(Block):
    """What a run must be."""

    backend: str = Field("gloo", description="Of all process groups.")


class Journal(System, key="journal"):
    """Ends a run in which its host does not say the truth, or a checkpoint forgets it."""

    Block = JournalBlock

    def __init__(self, block: JournalBlock, host: Host) -> None:
        super().__init__(block, host)
        self.began = self.steps = host.steps
        counted = sum(parameter.numel() for parameter in host.model.parameters() if host.counts(parameter))
        total = torch.tensor(counted)
        dist.all_reduce(total)
        self.parameters = int(total)
        for group in (dist.group.WORLD, host.mesh.group("model"), host.mesh.group("batch")):
            assert dist.get_backend(group) == block.backend

    def stepped(self) -> None:
        """As many steps as the host counts."""
        self.steps += 1
        assert self.steps == self.host.steps

    def state_dict(self) -> dict[str, Any]:
        """The same on every grid."""
        return {"steps": self.steps, "parameters": self.parameters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on, with as many parameters."""
        assert state == {"steps": self.host.steps, "parameters": self.parameters} and self.began > 0
        self.steps = state["steps"]


if __name__ in ("__main__", "imported"):
    assert GradientNoise.Block
    sys.path.insert(0, CHECKOUT)
    runpy.run_path(f"{CHECKOUT}/pretrain_gpt.py", run_name=__name__)
