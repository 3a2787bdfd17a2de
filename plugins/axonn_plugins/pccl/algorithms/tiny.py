"""All-reduce of data so small that only latency counts: recursive doubling of all of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from axonn_plugins.pccl.algorithms.flat import Nodes
from axonn_plugins.pccl.builder import Builder
from axonn_plugins.pccl.program import Program, Span


def tiny(collective: str, rank: int, size: int, nodes: Nodes, chunks: int) -> Program:
    """floor(log2 p) steps in which partners exchange and add all they have, and two more where p is no power of two.

    The bits are the same on all ranks: partners add the same two numbers, and a + b = b + a. Neighbours come first, so
    the first steps stay within a node.
    """
    if collective != "all_reduce":
        raise ValueError(f'collective = "{collective}" has no such algorithm; use it for "all_reduce"')
    members = [member for node in nodes for member in node]
    builder = Builder(collective, rank, 1, chunks, near=next(node for node in nodes if rank in node))
    all_sum(builder, members, [0])
    builder.keep([0])
    return in_blocks(builder.finish(), size)


def in_blocks(program: Program, size: int) -> Program:
    """The program in which all of `size` blocks move where the one block of `program` does."""

    def cut(spans: tuple[Span, ...]) -> tuple[Span, ...]:
        return tuple(Span(each.buffer, each.slot * size, 0, size) for each in spans)

    ops = tuple(replace(op, dst=cut(op.dst), src=cut(op.src)) for op in program.ops)
    return replace(program, size=size, work_slots=program.work_slots * size, ops=ops)


def all_sum(builder: Builder, members: Sequence[int], blocks: Collection[int]) -> None:
    """Recursive doubling of the blocks among `members`; a sum may be left in WORK (see `Builder.keep`).

    Of the 2r first members, where there are r more than a power of two, each odd one gives its data to the even one
    before it, and gets the sum in the end (Thakur, Rabenseifner, Gropp 2005). A step never adds into what it sends,
    which is still being read: sums alternate between two regions of WORK and end in OUTPUT.
    """
    if builder.rank not in members or len(members) == 1 or not blocks:
        return
    rounds = len(members).bit_length() - 1
    folded = len(members) - (1 << rounds)
    index = members.index(builder.rank)
    if index < 2 * folded and index % 2:
        for chunk in range(builder.chunks):
            builder.send(members[index - 1], blocks, chunk)
            builder.receive(members[index - 1], blocks, chunk)
        return
    if index < 2 * folded:
        for chunk in range(builder.chunks):
            builder.reduce(members[index + 1], blocks, chunk)
    active = [*members[0 : 2 * folded : 2], *members[2 * folded :]]
    me = active.index(builder.rank)
    regions = [builder.work(len(blocks)) for _ in range(min(max(rounds - 1, 1), 2))]
    for step in range(rounds):
        last = step == rounds - 1 and step > 0
        for chunk in range(builder.chunks):
            builder.send(active[me ^ 1 << step], blocks, chunk)
            builder.reduce(active[me ^ 1 << step], blocks, chunk, slots=() if last else regions[step % 2])
    if index < 2 * folded:
        for chunk in range(builder.chunks):
            builder.send(members[index + 1], blocks, chunk)
