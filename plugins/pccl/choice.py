"""Which algorithm does a collective of a size on given nodes best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """An algorithm by name, and into how many chunks blocks are cut."""

    algorithm: str
    chunks: int = 1


def choose(collective: str, size: int, nodes: Sequence[Sequence[int]]) -> Choice:
    """What to use where nothing was measured.

    Args:
        collective: its name.
        size: bytes of all blocks.
        nodes: the group's ranks by node.
    """
    several, shared = len(nodes) > 1, any(len(node) > 1 for node in nodes)
    small = size <= 2**19
    if collective == "broadcast":
        return Choice("binomial") if size <= 2**16 else Choice("chain", 4)
    if not several:
        if collective == "all_reduce" and size <= 2**14:
            return Choice("tiny")
        return Choice("direct")
    if collective == "all_reduce" and size <= 2**12:
        return Choice("tiny")
    if not shared:
        return Choice("bruck" if small else "ring")
    return Choice("hierarchical_log_direct" if small else "hierarchical_ring_direct", 1 if small else 2)
