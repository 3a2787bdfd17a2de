"""Megatron-LM's pretrain_gpt.py with systems of one's own, which are registered by their import: what a user writes."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from pydantic import Field

import samo
from axonn_plugins.config.base import Block
from axonn_plugins.hosts.host import Gradient, Host, System
from tests.compose.noise import GradientNoise
from tests.megatron.harness import CHECKOUT


class JournalBlock(Block):
    """Requirements on a run."""

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


class MaskedBlock(Block):
    """The share that is pruned."""

    sparsity: float = Field(0.9, description="Of each matrix but embeddings.")


class Masked(System, key="masked"):
    """Masked dense training on one rank by Megatron's own optimizer: what SAMO is compared with."""

    Block = MaskedBlock

    def __init__(self, block: MaskedBlock, host: Host) -> None:
        super().__init__(block, host)
        named = {name: parameter for parameter, name in host.serial_names().items()}
        matrices = {name: one for name, one in named.items() if one.dim() > 1 and "embedding." not in name}
        self.masks = samo.magnitude(matrices.items(), block.sparsity)
        with torch.no_grad():
            for name, mask in self.masks.items():
                matrices[name] *= mask
        host._optimizer.reload_model_params()

    def gradients(self, gradients: Iterable[Gradient]) -> None:
        """None of what is pruned."""
        for gradient in gradients:
            if gradient.name in self.masks:
                gradient.values.mul_(self.masks[gradient.name].view(-1))


class FrugalBlock(Block):
    """The memory that a run may take."""

    most: float = Field(
        description="Bytes of gradient, index and state of each element that is kept, beside the weights."
    )


class Frugal(System, key="frugal"):
    """Ends a run that holds more memory, has whole gradients, or has weights that are pruned and not zero."""

    Block = FrugalBlock

    def stepped(self) -> None:
        """Count all that Megatron's model and our optimizer hold."""
        optimizer, parameters = self.host._optimizer.optimizer, list(self.host.model.parameters())
        assert not any(one.grad is not None for one in parameters)
        assert not any(
            hasattr(one, "main_grad") for one in parameters if self.host.stages_with(self.host.serial_names()[one]) == 1
        )
        rest, kept = (
            optimizer.nbytes - sum(one.nbytes for one in parameters),
            sum(one.kept for one in optimizer.entries),
        )
        assert 0 < rest <= self.block.most * kept, f"{rest / kept} bytes"
        for entry in optimizer.entries:
            if entry.index is not None:
                assert int(entry.parameter.count_nonzero()) <= entry.kept < entry.parameter.numel() // 2


if __name__ in ("__main__", "imported"):
    assert GradientNoise.Block
    sys.path.insert(0, CHECKOUT)
    runpy.run_path(f"{CHECKOUT}/pretrain_gpt.py", run_name=__name__)
