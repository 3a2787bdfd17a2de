"""Communication-aware checkpointing: what Megatron recomputes is given what its first forward communicated (000, section 7.3.2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from megatron.core.tensor_parallel.random import CheckpointFunction

from axonn_plugins.config import Ted
from axonn_plugins.hosts.megatron import moe, process_groups
from axonn_plugins.hosts.megatron.originals import Originals
from axonn_tp.context.shared import AXIS
from ted_moe import Stashing
from ted_moe.adapters import Choices
from ted_moe.stash import Place

_originals = Originals()


def install(block: Ted) -> None:
    """Have activation checkpoints of a grid keep what collectives of activations returned, and experts what is said of them; the last counts."""
    uninstall()
    moe.choose(Choices(block.duplicate_token_dropping, block.fused, block.overlap_degree))
    if block.communication_aware_checkpointing:
        _originals.wrap(CheckpointFunction, "forward", lambda original: _stashing(original.__func__, block.stash))


def uninstall() -> None:
    """Leave Megatron as it was before `install`."""
    _originals.restore()
    moe.choose(Choices())


def _stashing(original: Callable[..., Any], place: Place) -> Any:
    @wraps(original)
    def forward(ctx: Any, run_function: Callable[..., Any], *rest: Any) -> Any:
        mesh = process_groups.mesh()
        # Weights are gathered over z ahead of their layers, and kept as --axonn-gather-cache says; over ranks that share sequences a mask is,
        # when it is first looked at.
        leave = tuple(mesh.group(axis).group_name for axis in ("z", AXIS) if mesh.size(axis) > 1)
        return original(ctx, Stashing(run_function, place, leave), *rest)

    return staticmethod(forward)
