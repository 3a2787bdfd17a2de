"""Collectives among all ranks alike, whatever node they are on."""

from __future__ import annotations

from collections.abc import Sequence

from axonn_plugins.pccl.algorithms.patterns import Pattern
from axonn_plugins.pccl.algorithms.phases import gather, scatter
from axonn_plugins.pccl.builder import Builder
from axonn_plugins.pccl.program import Program

Nodes = Sequence[Sequence[int]]
"""The group's ranks by node, such as ((0, 1), (2, 3))."""


def flat(collective: str, rank: int, size: int, nodes: Nodes, chunks: int, pattern: Pattern) -> Program:
    """`pattern` over all ranks, node after node; an all-reduce is a reduce-scatter and an all-gather.

    The all-gather of a block begins when the block is summed, whatever other blocks do.
    """
    members = [member for node in nodes for member in node]
    parts = [(member,) for member in members]
    builder = Builder(collective, rank, size, chunks, near=next(node for node in nodes if rank in node))
    if collective != "all_gather":
        scatter(builder, members, parts, pattern)
    if collective != "reduce_scatter":
        gather(builder, members, parts, pattern)
    builder.keep([rank])
    return builder.finish()
