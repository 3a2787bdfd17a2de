"""The algorithms by name: pure functions from a rank's place to its program."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from plugins.pccl.algorithms.flat import Nodes, flat
from plugins.pccl.algorithms.patterns import bruck, direct, doubling, ring
from plugins.pccl.program import Program


class Algorithm(Protocol):
    """Makes one rank's program."""

    def __call__(self, collective: str, rank: int, size: int, nodes: Nodes, chunks: int = 1) -> Program:
        """`nodes` are the group's ranks by node; every rank of `size` is on one."""


ALGORITHMS: dict[str, Algorithm] = {
    "ring": partial(flat, pattern=ring),
    "recursive": partial(flat, pattern=doubling),
    "bruck": partial(flat, pattern=bruck),
    "direct": partial(flat, pattern=direct),
}
