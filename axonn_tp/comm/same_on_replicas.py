"""Ranks that differ in x and y alone compute on the same samples with the same random numbers: looked at in fewer and fewer training passes.

A loop that was written for data parallelism gives each rank samples and a seed of its own, and split layers would mix these up without a word. Other samples
are refused; random states are made that of the first rank. A host that compares each call itself turns this off (`leave_to_host`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_tp.comm.collectives import all_gather
from axonn_tp.comm.overlap import in_backward
from axonn_tp.comm.unplanned_gradients import BINS, differing_axes, sketch
from axonn_tp.grid.leaves import leaves_of
from axonn_tp.grid.mesh import Mesh


def leave_to_host(model: nn.Module) -> None:
    """Look at none of a split model's passes, nor at the order of its layers."""
    forward: Any = getattr(model, "axonn_forward", None)
    if forward is not None:
        forward.same.looks = forward.order.looks = False


class SameOnReplicas:
    """Looks at a model's training passes.

    Args:
        mesh: the mesh.

    Attributes:
        looks: False where a host does.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._passes, self.looks = mesh, 0, mesh.size("model") > 1

    def begin(self, given: Any) -> None:
        """A pass begins; every rank calls it.

        Args:
            given: arguments of the model's forward.

        Raises:
            ValueError: ranks of x or y have others; the same on all of them.
        """
        if not self.looks or in_backward() or _within_checkpoint():
            return
        self._passes += 1
        if self._passes & (self._passes - 1) or _capturing(self._mesh.device):
            return
        states = _states(self._mesh.device)
        digests = torch.tensor([zlib.crc32(state.numpy().tobytes()) for state in states], dtype=torch.float64)
        mine = torch.cat([_sketch_of(leaves_of(given)), digests])[None].to(self._mesh.device)
        sketches, digests = all_gather(mine, self._mesh, "model").cpu().split([BINS, len(states)], 1)
        axes = [axis for axis in differing_axes(sketches, self._mesh.size("x")) if self._mesh.size(axis) > 1]
        if axes:
            raise ValueError(
                f"ranks of {' and '.join(axes)} call the model with different inputs, and split layers would mix them up: ranks that differ in x and y alone "
                "compute on the same samples; have all ranks read the same batch and give the model mesh.shard_batch(batch), or read by "
                'mesh.rank("readers") of mesh.size("readers")'
            )
        if (digests != digests[0]).any():
            _take_first(self._mesh.group("model"), states, self._mesh.device)


def _within_checkpoint() -> bool:
    """True if the pass will be made again, with these random numbers and the same collectives."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # type: ignore[attr-defined]


def _capturing(device: torch.device) -> bool:
    """True within a CUDA graph's capture, in which nothing can be read."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _sketch_of(leaves: Iterable[Any]) -> Tensor:
    found = torch.zeros(BINS, dtype=torch.float64)
    for number, leaf in enumerate(leaves):
        # What needs a gradient was computed, as a share maybe, by another model.
        if type(leaf) is Tensor and not leaf.requires_grad and leaf.layout is torch.strided and not leaf.is_meta:
            found += (number + 1) * sketch(leaf if leaf.is_complex() else leaf.double().nan_to_num()).cpu()
    return found


def _states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _take_first(group: dist.ProcessGroup, states: list[Tensor], device: torch.device) -> None:
    first = [state.to(device) for state in states]
    for state in first:
        dist.broadcast(state, group=group, group_src=0)
    torch.set_rng_state(first[0].cpu())
    if len(first) > 1:
        torch.cuda.set_rng_state(first[1].cpu(), device)
