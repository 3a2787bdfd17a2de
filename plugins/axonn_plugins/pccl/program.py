"""A rank's part of one collective, as data: who sends which blocks to whom, into which memory, after what.

A collective on p ranks moves p *blocks*. An all-gather's block b is what rank b brings, a reduce-scatter's what rank b
ends with; an all-reduce cuts its elements into p blocks. Every block may be cut into `chunks` pieces, which travel one
by one, so that a later phase starts on a chunk when that chunk is there. Programs are made by
`axonn_plugins.pccl.algorithms`, proved by `axonn_plugins.pccl.check`, timed by `axonn_plugins.pccl.simulate` and run by the C++ engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")


class Kind(IntEnum):
    """Kinds of operations."""

    SEND = 0
    """Send the `src` spans, one after the other, as one message."""
    RECV = 1
    """Receive one message into the `dst` spans."""
    REDUCE = 2
    """Receive one message and combine it elementwise: dst = src (+) message; `dst` may be `src`."""
    COPY = 3
    """dst = src, within the rank."""


class Buffer(IntEnum):
    """The memories of a rank."""

    INPUT = 0
    """The caller's tensor: for an all-gather the own block in slot 0, else p blocks, slot = block."""
    OUTPUT = 1
    """The caller's result: for a reduce-scatter the own block in slot 0, else p blocks, slot = block."""
    WORK = 2
    """`Program.work_slots` slots, each as long as the longest block."""


@dataclass(frozen=True)
class Span:
    """`count` consecutive slots from `slot`, which hold the `count` consecutive blocks from `block`."""

    buffer: Buffer
    slot: int
    block: int
    count: int = 1


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        kind: what it does.
        peer: the other side's group rank; -1 for COPY.
        dst: where RECV, REDUCE and COPY write.
        src: what SEND, REDUCE and COPY read.
        after: earlier operations of this rank that must be complete before this one begins, and no others.
        chunk: which chunk of every block of the spans; -1 for whole blocks.
    """

    kind: Kind
    peer: int
    dst: tuple[Span, ...] = ()
    src: tuple[Span, ...] = ()
    after: tuple[int, ...] = ()
    chunk: int = -1


@dataclass(frozen=True)
class Program:
    """One rank's part of a collective.

    The k-th SEND from i to j in i's order matches the k-th RECV or REDUCE from i in j's; messages of length 0 are sent
    too. Operations run in any order that `Op.after` allows; ready ones are best started in list order.
    """

    collective: str
    rank: int
    size: int
    chunks: int
    work_slots: int
    ops: tuple[Op, ...]
    root: int = 0
    """The rank whose INPUT a broadcast spreads; the others' is not read."""


def block_lengths(elements: int, size: int) -> list[int]:
    """Elements of each of the `size` blocks that `elements` are cut into: the first ones are longer by one."""
    base, longer = divmod(elements, size)
    return [base + (block < longer) for block in range(size)]


def chunk_bounds(length: int, chunks: int, chunk: int) -> tuple[int, int]:
    """First and end element of a chunk of a block of `length` elements; chunk -1 is the whole block."""
    if chunk < 0:
        return 0, length
    return length * chunk // chunks, length * (chunk + 1) // chunks


def cells(spans: tuple[Span, ...]) -> Iterator[tuple[Buffer, int, int]]:
    """Each (buffer, slot, block) of the spans, in order."""
    for span in spans:
        for step in range(span.count):
            yield span.buffer, span.slot + step, span.block + step


def tags(program: Program) -> list[int]:
    """Each operation's number among the messages of its ordered pair; 0 for COPY."""
    seen: Counter[tuple[bool, int]] = Counter()
    numbers = []
    for op in program.ops:
        if op.kind is Kind.COPY:
            numbers.append(0)
            continue
        pair = op.kind is Kind.SEND, op.peer
        numbers.append(seen[pair])
        seen[pair] += 1
    return numbers


def flatten(program: Program) -> dict[str, list[int]]:
    """The program as flat lists of integers, for the C++ engine.

    Returns:
        "ops": rows of 9: kind, peer, tag, chunk, dst_first, dst_count, src_first, src_count, after_count (the firsts
        and counts are rows of "spans"); "spans": rows of 4: buffer, slot, block, count; "after": the operations'
        `after`, one after the other; and lists of one integer: "chunks", "work_slots", "size", "rank".
    """
    ops: list[int] = []
    spans: list[int] = []
    after: list[int] = []
    for op, tag in zip(program.ops, tags(program), strict=True):
        first = len(spans) // 4
        middle = first + len(op.dst)
        ops += [op.kind, op.peer, tag, op.chunk, first, len(op.dst), middle, len(op.src), len(op.after)]
        for span in op.dst + op.src:
            spans += [span.buffer, span.slot, span.block, span.count]
        after += op.after
    return {
        "ops": [int(number) for number in ops],
        "spans": [int(number) for number in spans],
        "after": after,
        "chunks": [program.chunks],
        "work_slots": [program.work_slots],
        "size": [program.size],
        "rank": [program.rank],
    }
