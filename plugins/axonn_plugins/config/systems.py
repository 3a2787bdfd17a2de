"""Keys of the block that others add: systems of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from axonn_plugins.config.base import Block


@dataclass(frozen=True)
class Registered:
    """A key, what may be in it, and the class of its system."""

    block: type[Block]
    system: Any


REGISTERED: dict[str, Registered] = {}
"""Systems of users' own that are known, by key."""
_OURS = (
    "requires",
    "tensor_parallel",
    "pccl",
    "samo",
    "ted",
    "offload_optimizer",
    "pipeline",
    "goldfish",
    "overlap_param_gather",
)


def register(key: str, block: type[Block], system: Any) -> None:
    """Make a key known.

    Raises:
        ValueError: the suite has it.
    """
    if key in _OURS:
        raise ValueError(f"axonn.{key} is a key of the suite; choose another name")
    REGISTERED[key] = Registered(block, system)
