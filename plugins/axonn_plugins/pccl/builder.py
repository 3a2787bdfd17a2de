"""Writes a rank's program line by line, and finds by itself what must wait for what."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from axonn_plugins.pccl.program import Buffer, Kind, Op, Program, Span, cells

Place = tuple[Buffer, int]
"""A buffer and a slot of it."""

REUSE_FROM = 4
"""WORK slots are used anew only when there are so many: a ring then has room for messages on their way."""
_WINDOW = 1024
"""Operations back to which one knows what those before it wait for: all the way would take memory by the square of a program."""
_IN_WINDOW = (1 << _WINDOW) - 1


class Builder:
    """The operations of one rank so far, and where each block's newest value stands.

    Operations are written as if they ran one after the other; `finish` keeps of that order only what memory demands
    (a read after the write it reads, a write after the reads and the write before it), so all else may overlap. INPUT
    and OUTPUT count as one memory wherever the caller may pass the same one.

    Args:
        collective: one of `axonn_plugins.pccl.program.COLLECTIVES`.
        rank: this rank.
        size: ranks, and blocks.
        chunks: pieces a block is cut into.
        near: the ranks of this rank's node; operations with all others come first in the program.
        root: who has a broadcast's data.
    """

    def __init__(
        self, collective: str, rank: int, size: int, chunks: int, near: Collection[int] = (), root: int = 0
    ) -> None:
        self.collective, self.rank, self.size, self.chunks, self.root = collective, rank, size, chunks, root
        self._near = frozenset(near)
        self._ops: list[Op] = []
        self._wrote: dict[tuple[Buffer, int, int], int] = {}
        self._read: dict[tuple[Buffer, int, int], list[int]] = defaultdict(list)
        self._ancestors: list[int] = []
        self._slots: dict[int, int] = {}
        self._freed: list[int] = []
        self._leaving: list[int] = []
        self._left_to_send: dict[int, int] = {}
        self._work_slots = 0
        places = inputs(collective, rank, size, root)
        self._at: list[dict[int, Place]] = [dict(places) for _ in range(chunks)]

    def send(self, peer: int, blocks: Collection[int], chunk: int) -> None:
        """Send the newest value of the blocks' chunk; no message where there are no blocks."""
        if not blocks:
            return
        places = [(block, self._at[chunk][block]) for block in sorted(blocks)]
        self.add(Kind.SEND, peer, src=_spans(places), chunk=chunk)
        for block in blocks:
            self._sent(block)

    def receive(self, peer: int, blocks: Collection[int], chunk: int) -> None:
        """Receive the blocks' chunk into its place in OUTPUT."""
        if not blocks:
            return
        places = [(block, self._home(block)) for block in sorted(blocks)]
        self.add(Kind.RECV, peer, dst=_spans(places), chunk=chunk)
        self._at[chunk].update(places)

    def reduce(self, peer: int, blocks: Collection[int], chunk: int, slots: Sequence[int] = ()) -> None:
        """Receive the peer's partial sums of the blocks' chunk and add them to this rank's.

        The sums stand where this rank needs them in the end or, if `slots` of WORK are given, there.
        """
        if not blocks:
            return
        src = [(block, self._at[chunk][block]) for block in sorted(blocks)]
        sums = [(Buffer.WORK, slot) for slot in slots] or [self._sum_place(block) for block in sorted(blocks)]
        dst = list(zip(sorted(blocks), sums, strict=True))
        self.add(Kind.REDUCE, peer, dst=_spans(dst), src=_spans(src), chunk=chunk)
        self._at[chunk].update(dst)

    def phase(self) -> None:
        """Begin a phase, which may overlap with those before it: the slots that they free are not used anew."""
        self._freed.clear()
        self._leaving.clear()

    def step(self) -> None:
        """Begin a step: the slots that earlier steps sent are free.

        Not those of the same step: if every rank of a ring received only when its own message had been taken, and
        messages were taken only when received, none would ever be.
        """
        self._freed += self._leaving
        self._leaving.clear()

    def work(self, count: int) -> list[int]:
        """Fresh WORK slots."""
        self._work_slots += count
        return list(range(self._work_slots - count, self._work_slots))

    def keep(self, blocks: Iterable[int]) -> None:
        """Copy to their place in OUTPUT those of the blocks whose newest value stands elsewhere."""
        for chunk in range(self.chunks):
            astray = [block for block in sorted(blocks) if self._at[chunk][block] != self._home(block)]
            if astray:
                homes = [(block, self._home(block)) for block in astray]
                places = [(block, self._at[chunk][block]) for block in astray]
                self.add(Kind.COPY, -1, dst=_spans(homes), src=_spans(places), chunk=chunk)
                self._at[chunk].update(homes)

    def add(
        self,
        kind: Kind,
        peer: int,
        dst: tuple[Span, ...] = (),
        src: tuple[Span, ...] = (),
        chunk: int = -1,
    ) -> None:
        """Write any operation; it waits for those before it that touch the same memory."""
        index = len(self._ops)
        reads, writes = list(self._cells(src, chunk)), list(self._cells(dst, chunk))
        if kind is Kind.COPY and reads == writes:  # nothing to do where it is one memory, else nobody else's concern
            reads, writes = [], []
        waits = {self._wrote[cell] for cell in reads + writes if cell in self._wrote}
        for cell in writes:
            waits.update(self._read.pop(cell, ()))
            self._wrote[cell] = index
        for cell in reads:
            self._read[cell].append(index)
        waits.discard(index)
        after, known = [], 0
        for wait in sorted(waits, reverse=True):
            back = index - wait - 1
            if not known >> back & 1:
                after.append(wait)
                if back < _WINDOW:
                    known = (known | (self._ancestors[wait] << 1 | 1) << back) & _IN_WINDOW
        self._ancestors.append(known)
        shown = chunk if self.chunks > 1 else -1
        self._ops.append(Op(kind, peer, dst, src, tuple(sorted(after)), shown))

    def finish(self) -> Program:
        """The program: operations with other nodes as early as what they wait for allows, then the rest in order."""
        ops = _far_first(self._ops, self._near)
        return Program(self.collective, self.rank, self.size, self.chunks, self._work_slots, ops, self.root)

    def _cells(self, spans: tuple[Span, ...], chunk: int) -> Iterable[tuple[Buffer, int, int]]:
        chunks = range(self.chunks) if chunk < 0 else (chunk,)
        for buffer, slot, _ in cells(spans):
            memory = canonical(self.collective, self.rank, buffer, slot)
            for each in chunks:
                yield *memory, each

    def _home(self, block: int) -> Place:
        return Buffer.OUTPUT, 0 if self.collective == "reduce_scatter" else block

    def _sum_place(self, block: int) -> Place:
        """Where this rank adds up a block: in OUTPUT where it has room there, else in a WORK slot."""
        if self.collective == "all_reduce" or block == self.rank:
            return self._home(block)
        if block not in self._slots:
            if self._work_slots >= REUSE_FROM and self._freed:
                self._slots[block] = self._freed.pop(0)
            else:
                self._slots[block] = self._work_slots
                self._work_slots += 1
            self._left_to_send[block] = self.chunks
        return Buffer.WORK, self._slots[block]

    def _sent(self, block: int) -> None:
        """A partial sum that is sent is not needed here again: when all its chunks are, its slot is given up."""
        if block in self._slots:
            self._left_to_send[block] -= 1
            if not self._left_to_send[block]:
                self._leaving.append(self._slots.pop(block))


def inputs(collective: str, rank: int, size: int, root: int = 0) -> dict[int, Place]:
    """The blocks that a rank has at the start, and where."""
    if collective == "all_gather":
        return {rank: (Buffer.INPUT, 0)}
    if collective == "broadcast" and rank != root:
        return {}
    return {block: (Buffer.INPUT, block) for block in range(size)}


def canonical(collective: str, rank: int, buffer: Buffer, slot: int) -> Place:
    """One name for memory that may be the caller's same memory: OUTPUT's, except for a reduce-scatter."""
    if collective == "reduce_scatter":
        return (Buffer.INPUT, rank) if buffer is Buffer.OUTPUT else (buffer, slot)
    if buffer is Buffer.INPUT:
        return Buffer.OUTPUT, rank if collective == "all_gather" else slot
    return buffer, slot


def _spans(places: list[tuple[int, Place]]) -> tuple[Span, ...]:
    """(block, place) pairs as spans, as few as they go into."""
    spans: list[Span] = []
    for block, (buffer, slot) in places:
        last = spans[-1] if spans else None
        if last and (last.buffer, last.slot + last.count, last.block + last.count) == (buffer, slot, block):
            spans[-1] = Span(buffer, last.slot, last.block, last.count + 1)
        else:
            spans.append(Span(buffer, slot, block))
    return tuple(spans)


def _far_first(ops: list[Op], near: frozenset[int]) -> tuple[Op, ...]:
    """Reorder: exchanges with other nodes first, copies last, the messages of a pair in their order."""
    waiting = [len(op.after) for op in ops]
    followers: list[list[int]] = [[] for _ in ops]
    last: dict[tuple[bool, int], int] = {}
    for index, op in enumerate(ops):
        for earlier in op.after:
            followers[earlier].append(index)
        pair = op.kind is Kind.SEND, op.peer
        if op.kind is not Kind.COPY:
            if pair in last:
                followers[last[pair]].append(index)
                waiting[index] += 1
            last[pair] = index
    turn = [2 if op.kind is Kind.COPY else int(op.peer in near) for op in ops]
    ready = [(turn[index], index) for index, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for follower in followers[index]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (turn[follower], follower))
    new = {old: index for index, old in enumerate(order)}
    return tuple(
        Op(op.kind, op.peer, op.dst, op.src, tuple(sorted(new[wait] for wait in op.after)), op.chunk)
        for op in (ops[old] for old in order)
    )
