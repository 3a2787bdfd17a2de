"""Two levels with one rank of each node at work between nodes: the fewest messages, for sizes at which these are what costs."""

from __future__ import annotations

from collections.abc import Sequence

from axonn_plugins.pccl.algorithms.flat import Nodes
from axonn_plugins.pccl.algorithms.patterns import Pattern
from axonn_plugins.pccl.algorithms.phases import gather, scatter
from axonn_plugins.pccl.algorithms.tiny import all_sum, in_blocks
from axonn_plugins.pccl.builder import Builder
from axonn_plugins.pccl.program import Program


def led(collective: str, rank: int, size: int, nodes: Nodes, chunks: int, inter: Pattern) -> Program:
    """The first rank of each node collects the node's data, runs `inter` with the others' first ranks, and hands out.

    As many steps between nodes as `hierarchical`, and as many bytes, in 1/M of the messages (M ranks a node); within a
    node all passes through one rank.
    """
    builder, node, heads = _begin(collective, rank, size, nodes, chunks)
    parts = [tuple(each) for each in nodes]
    if collective == "all_gather":
        _collect(builder, node)
    else:
        _sum_up(builder, node)
        scatter(builder, heads, parts, inter)
    if collective != "reduce_scatter":
        gather(builder, heads, parts, inter)
    _hand_out(builder, node)
    builder.keep([rank])
    return builder.finish()


def led_doubling(collective: str, rank: int, size: int, nodes: Nodes, chunks: int) -> Program:
    """An all-reduce with the fewest latencies: between the nodes' first ranks recursive doubling of all data."""
    if collective != "all_reduce":
        raise ValueError(f'collective = "{collective}" has no such algorithm; use it for "all_reduce"')
    builder, node, heads = _begin(collective, rank, 1, nodes, chunks)
    _sum_up(builder, node)
    all_sum(builder, heads, [0])
    _hand_out(builder, node)
    builder.keep([0])
    return in_blocks(builder.finish(), size)


def _begin(
    collective: str, rank: int, size: int, nodes: Nodes, chunks: int
) -> tuple[Builder, Sequence[int], list[int]]:
    node = next(each for each in nodes if rank in each)
    return Builder(collective, rank, size, chunks, near=node), node, [each[0] for each in nodes]


def _collect(builder: Builder, node: Sequence[int]) -> None:
    """The first rank of the node gets the others' own blocks."""
    for chunk in range(builder.chunks):
        if builder.rank != node[0]:
            builder.send(node[0], (builder.rank,), chunk)
        else:
            for other in node[1:]:
                builder.receive(other, (other,), chunk)


def _sum_up(builder: Builder, node: Sequence[int]) -> None:
    """The first rank of the node adds the others' blocks to its own."""
    blocks = range(builder.size)
    for chunk in range(builder.chunks):
        if builder.rank != node[0]:
            builder.send(node[0], blocks, chunk)
        else:
            for other in node[1:]:
                builder.reduce(other, blocks, chunk)


def _hand_out(builder: Builder, node: Sequence[int]) -> None:
    """The first rank of the node gives the others what they lack."""
    for chunk in range(builder.chunks):
        for other in node[1:]:
            lacks = {
                "all_gather": [block for block in range(builder.size) if block != other],
                "reduce_scatter": [other],
                "all_reduce": list(range(builder.size)),
            }[builder.collective]
            if builder.rank == node[0]:
                builder.send(other, lacks, chunk)
            elif builder.rank == other:
                builder.receive(node[0], lacks, chunk)
