"""Broadcast: between nodes a tree or, where the data is large, a line; within a node a tree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from axonn_plugins.pccl.algorithms.flat import Nodes
from axonn_plugins.pccl.builder import Builder
from axonn_plugins.pccl.program import Program


def binomial(collective: str, rank: int, size: int, nodes: Nodes, chunks: int, root: int = 0) -> Program:
    """A tree: ceil(log2 N) steps among one rank of each node, then ceil(log2 M) within each node."""
    return _broadcast(collective, rank, size, nodes, chunks, root, _tree)


def chain(collective: str, rank: int, size: int, nodes: Nodes, chunks: int, root: int = 0) -> Program:
    """Chunks go from node to node in a line: no node's link carries the data twice, in N + chunks - 2 steps."""
    return _broadcast(collective, rank, size, nodes, chunks, root, _line)


Spread = Callable[[Builder, Sequence[int], Collection[int]], None]


def _broadcast(collective: str, rank: int, size: int, nodes: Nodes, chunks: int, root: int, between: Spread) -> Program:
    if collective != "broadcast":
        raise ValueError(f'collective = "{collective}" has no such algorithm; use it for "broadcast"')
    node = next(node for node in nodes if rank in node)
    builder = Builder(collective, rank, size, chunks, near=node, root=root)
    heads = [root if root in each else each[0] for each in nodes]
    between(builder, _from(heads, root), range(size))
    _tree(builder, _from(node, root if root in node else node[0]), range(size))
    builder.keep(range(size))
    return builder.finish()


def _line(builder: Builder, members: Sequence[int], blocks: Collection[int]) -> None:
    if builder.rank not in members:
        return
    index = members.index(builder.rank)
    for chunk in range(builder.chunks):
        if index:
            builder.receive(members[index - 1], blocks, chunk)
        if index + 1 < len(members):
            builder.send(members[index + 1], blocks, chunk)


def _from(members: Sequence[int], first: int) -> list[int]:
    start = members.index(first)
    return [*members[start:], *members[:start]]


def _tree(builder: Builder, members: Sequence[int], blocks: Collection[int]) -> None:
    """The binomial tree from members[0]: member i gets the data from i less its highest bit."""
    if builder.rank not in members:
        return
    index = members.index(builder.rank)
    for chunk in range(builder.chunks):
        if index:
            builder.receive(members[index - (1 << index.bit_length() - 1)], blocks, chunk)
        bit = 1 << index.bit_length()
        while index + bit < len(members):
            builder.send(members[index + bit], blocks, chunk)
            bit *= 2
