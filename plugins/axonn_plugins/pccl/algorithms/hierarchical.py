"""Two levels: between nodes every local index is a lane of its own, within a node all exchange what the lanes bring.

Section 6.2.1 of the dissertation, with its final shuffle and its wait between the phases gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from axonn_plugins.pccl.algorithms.flat import Nodes
from axonn_plugins.pccl.algorithms.patterns import Pattern
from axonn_plugins.pccl.algorithms.phases import Blocks, gather, scatter
from axonn_plugins.pccl.algorithms.tiny import all_sum
from axonn_plugins.pccl.builder import Builder
from axonn_plugins.pccl.program import Program

MOST_GROUPS = 64
"""Times that a node's ranks exchange a chunk in a phase; with more, its messages would be small and its schedule long."""


class Lanes:
    """Who carries which blocks between nodes.

    There are as many lanes as the smallest node has ranks; lane l runs over the l-th rank of every node, and what a
    node's further ranks own is dealt out among its lanes, so the links of all nodes carry each block once.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.count = min(len(node) for node in nodes)
        self.members = [[node[lane] for node in nodes] for lane in range(self.count)]
        self.parts = [[tuple(node[lane :: self.count]) for node in nodes] for lane in range(self.count)]

    def extra(self, node: int) -> list[tuple[int, int]]:
        """(rank, the lane rank that carries its block) for the node's ranks that are in no lane."""
        ranks = self.nodes[node]
        return [(ranks[local], ranks[local % self.count]) for local in range(self.count, len(ranks))]

    def groups(self, node: int, pattern: Pattern) -> list[list[Blocks]]:
        """Blocks that arrive together at each of the node's lanes: first its own, then each step's; [group][local rank]."""
        groups: list[list[Blocks]] = [[parts[node] for parts in self.parts]]
        for step in pattern(node, len(self.nodes)):
            groups.append([tuple(block for part in step.receives for block in parts[part]) for parts in self.parts])
        idle: list[Blocks] = [()] * (len(self.nodes[node]) - self.count)
        return [group + idle for group in groups]


def hierarchical(
    collective: str, rank: int, size: int, nodes: Nodes, chunks: int, inter: Pattern, intra: Pattern
) -> Program:
    """`inter` in every lane and `intra` in every node.

    With several chunks, what one step between nodes brought goes on within the node while the next step runs (and in a
    reduce-scatter, what a step sends first is summed first), several steps together where there are more than
    `MOST_GROUPS`; with one chunk it goes on at once at the end, in the fewest messages.
    """
    here = next(index for index, node in enumerate(nodes) if rank in node)
    node, lanes = nodes[here], Lanes(nodes)
    builder = Builder(collective, rank, size, chunks, near=node)
    groups = lanes.groups(here, inter)
    together = len(groups) if chunks == 1 else -(-len(groups) // MOST_GROUPS)
    groups = [_joined(groups[at : at + together]) for at in range(0, len(groups), together)]
    extra = lanes.extra(here) if collective != "all_reduce" else []
    if collective != "all_gather":
        for group in reversed(groups):
            for chunk in range(chunks):
                scatter(builder, node, group, intra, [chunk])
        _between(builder, lanes, inter, scatter)
    if collective == "reduce_scatter":
        for other, lane in extra:
            _hand_over(builder, lane, other, other)
    if collective == "all_gather":
        for other, lane in extra:
            _hand_over(builder, other, lane, other)
    if collective != "reduce_scatter":
        _between(builder, lanes, inter, gather)
        held: dict[int, Blocks] = {other: (other,) for other, _ in extra}
        for group in groups:
            for chunk in range(chunks):
                gather(builder, node, group, intra, held, [chunk])
    builder.keep([rank])
    return builder.finish()


def hierarchical_doubling(collective: str, rank: int, size: int, nodes: Nodes, chunks: int, intra: Pattern) -> Program:
    """An all-reduce with the fewest latencies between nodes: recursive doubling of each lane's share of the data."""
    if collective != "all_reduce":
        raise ValueError(f'collective = "{collective}" has no such algorithm; use it for "all_reduce"')
    here = next(index for index, node in enumerate(nodes) if rank in node)
    node, lanes = nodes[here], Lanes(nodes)
    builder = Builder(collective, rank, size, chunks, near=node)
    shares = [tuple(range(lane * size // lanes.count, (lane + 1) * size // lanes.count)) for lane in range(lanes.count)]
    parts = shares + [()] * (len(node) - lanes.count)
    scatter(builder, node, parts, intra)
    for members, share in zip(lanes.members, shares, strict=True):
        all_sum(builder, members, share)
    gather(builder, node, parts, intra)
    builder.keep(range(size))
    return builder.finish()


def _joined(groups: Sequence[Sequence[Blocks]]) -> list[Blocks]:
    """For each local rank all that the groups bring it."""
    return [tuple(block for part in parts for block in part) for parts in zip(*groups, strict=True)]


def _between(builder: Builder, lanes: Lanes, pattern: Pattern, phase: Callable[..., None]) -> None:
    for members, parts in zip(lanes.members, lanes.parts, strict=True):
        phase(builder, members, parts, pattern)


def _hand_over(builder: Builder, giver: int, taker: int, block: int) -> None:
    for chunk in range(builder.chunks):
        if builder.rank == giver:
            builder.send(taker, (block,), chunk)
        elif builder.rank == taker:
            builder.receive(giver, (block,), chunk)
