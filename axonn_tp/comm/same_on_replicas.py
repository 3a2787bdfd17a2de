"""Ranks that differ in x and y alone compute on the same samples with the same random numbers: looked at in fewer and fewer training passes.

A loop that was written for data parallelism gives each rank samples and a seed of its own, and split layers would mix these up without a word. Other samples
are refused; random states are made that of the first rank. It goes by the group's store, so that a pass has no collective more.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from axonn_tp.comm.unplanned_gradients import differing_axes, sketch
from axonn_tp.grid.mesh import Mesh

_LONGEST_NAP = 0.05
_looks: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class SameOnReplicas:
    """Looks at a model's training passes.

    Args:
        mesh: the mesh.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._passes = mesh, 0

    def begin(self, given: Any) -> None:
        """A pass begins; every rank calls it.

        Args:
            given: arguments of the model's forward.

        Raises:
            ValueError: ranks of x or y have others; the same on all of them.
        """
        self._passes += 1
        if self._mesh.size("model") == 1 or self._passes & (self._passes - 1):
            return
        group, states = self._mesh.group("model"), _states(self._mesh.device)
        cards = _exchanged(
            group, {"inputs": _sketch_of(tree_leaves(given)).tolist(), "states": [_of(state) for state in states]}
        )
        sketches = torch.tensor([card["inputs"] for card in cards], dtype=torch.float64)
        axes = [axis for axis in differing_axes(sketches, self._mesh.size("x")) if self._mesh.size(axis) > 1]
        if axes:
            raise ValueError(
                f"ranks of {' and '.join(axes)} call the model with different inputs, and split layers would mix them up: ranks that differ in x and y alone "
                "compute on the same samples; have all ranks read the same batch and give the model mesh.shard_batch(batch), or read by "
                'mesh.rank("readers") of mesh.size("readers")'
            )
        if any(card["states"] != cards[0]["states"] for card in cards):
            _take_first(group, states, self._mesh.device)


def _sketch_of(leaves: Iterable[Any]) -> Tensor:
    found = torch.zeros(64, dtype=torch.float64)
    for number, leaf in enumerate(leaves):
        # What needs a gradient was computed, as a share maybe, by another model.
        if type(leaf) is Tensor and not leaf.requires_grad and leaf.layout is torch.strided and not leaf.is_meta:
            found += (number + 1) * sketch(leaf if leaf.is_complex() else leaf.double().nan_to_num()).cpu()
    return found


def _states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _of(state: Tensor) -> int:
    return zlib.crc32(state.numpy().tobytes())


def _exchanged(group: dist.ProcessGroup, card: dict[str, Any]) -> list[dict[str, Any]]:
    """The cards of all ranks of a group."""
    store = dist.distributed_c10d._get_process_group_store(group)
    number = _looks[group] = _looks.get(group, 0) + 1
    store.set(f"axonn same {number} {group.rank()}", json.dumps(card))
    keys = [f"axonn same {number} {rank}" for rank in range(group.size())]
    deadline, nap = time.monotonic() + store.timeout.total_seconds(), 0.0005
    # A client that waits inside the store keeps this process's other threads from it.
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP)
    found = [json.loads(store.get(key)) for key in keys]
    store.delete_key(f"axonn same {number - 1} {group.rank()}")  # which all have read that are here
    return found


def _take_first(group: dist.ProcessGroup, states: list[Tensor], device: torch.device) -> None:
    first = [state.to(device) for state in states]
    for state in first:
        dist.broadcast(state, group=group, group_src=0)
    torch.set_rng_state(first[0].cpu())
    if len(first) > 1:
        torch.cuda.set_rng_state(first[1].cpu(), device)
