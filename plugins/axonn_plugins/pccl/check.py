"""Proves the programs of all ranks of a collective right, and counts what they move: the engine's slow reference."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence

from axonn_plugins.pccl.builder import canonical, inputs
from axonn_plugins.pccl.graph import Event, Graph, ProgramError, Report, match, report
from axonn_plugins.pccl.program import Buffer, Kind, Program, Span

Access = tuple[list[int], list[int]]
"""The cells an operation reads and those it writes."""


def check(
    programs: Sequence[Program], nodes: Sequence[Sequence[int]] = (), lengths: Sequence[int] = (), orders: int = 2
) -> Report:
    """Check one collective.

    Messages match in number, peers and blocks; no order of execution deadlocks, even if a SEND ends only when its
    receiver takes it; operations that touch the same memory are ordered, whether the caller passes one memory as INPUT
    and OUTPUT or two; in `orders` random executions nothing unset is read, every block and every contribution arrives
    exactly once, and all ranks and executions combine them in the same order, so in the same bits.

    Args:
        programs: one per rank.
        nodes: the ranks by node, for the report; by default all on one.
        lengths: elements of each block; by default `chunks` each, so that a chunk counts 1.
        orders: random executions for each of the two cases of INPUT and OUTPUT.

    Raises:
        ProgramError: a check failed.
    """
    senders = match(programs)
    events = sum(2 * len(program.ops) for program in programs)
    stuck = events - len(Graph(programs, senders, rendezvous=True).order())
    if stuck:
        raise ProgramError(f"deadlock: {stuck} of {events} beginnings and ends never happen")
    symbols = _Values()
    outcomes = []
    for shared in (False, True):
        accesses = [_accesses(program, shared) for program in programs]
        for program in programs:
            _races(program, accesses[program.rank], programs, senders)
        for seed in range(orders):
            execution = _Execution(programs, senders, accesses, shared, symbols)
            outcomes.append(execution.run(random.Random(seed)))
    if any(outcome != outcomes[0] for outcome in outcomes):
        raise ProgramError("results differ between orders of execution")
    if programs[0].collective == "all_reduce" and any(values != outcomes[0][0] for values in outcomes[0]):
        raise ProgramError("ranks sum in different orders, so to different bits")
    return report(programs, nodes, lengths, senders)


def _memory(program: Program, spans: tuple[Span, ...], chunk: int, shared: bool) -> list[int]:
    """The cells (a chunk of a slot) that spans name, as numbers.

    Where `shared`, INPUT and OUTPUT are one memory as far as a caller may make them.
    """
    found: list[int] = []
    chunks = range(program.chunks) if chunk < 0 else (chunk,)
    for span in spans:
        buffer, slot = span.buffer, span.slot
        if shared:
            buffer, slot = canonical(program.collective, program.rank, buffer, slot)
        first = (buffer * _SLOTS + slot) * program.chunks
        for place in range(first, first + span.count * program.chunks, program.chunks):
            found += [place + each for each in chunks]
    return found


_SLOTS = 1 << 32


def _accesses(program: Program, shared: bool) -> list[Access]:
    """The cells each operation reads and writes; a COPY onto itself is not done."""
    found: list[Access] = []
    for op in program.ops:
        reads, writes = (_memory(program, spans, op.chunk, shared) for spans in (op.src, op.dst))
        found.append(([], []) if op.kind is Kind.COPY and reads == writes else (reads, writes))
    return found


def _races(program: Program, accesses: list[Access], programs: Sequence[Program], senders: dict[Event, Event]) -> None:
    """Every two accesses of one cell, one of them a write, must be ordered: by `after`, or through other ranks."""
    before: list[int] = []
    readers: dict[int, list[int]] = defaultdict(list)
    writers: dict[int, list[int]] = defaultdict(list)
    graph: Graph | None = None
    for index, (op, (reads, writes)) in enumerate(zip(program.ops, accesses, strict=True)):
        known = 0
        for wait in op.after:
            known |= before[wait] | 1 << wait
        before.append(known)
        others = {other for cell in reads for other in writers[cell]}
        others |= {other for cell in writes for other in writers[cell] + readers[cell]}
        for other in others:
            if known >> other & 1:
                continue
            graph = graph or Graph(programs, senders, rendezvous=False)
            a, b = (program.rank, other), (program.rank, index)
            if not graph.precedes(a, b) and not graph.precedes(b, a):
                raise ProgramError(f"operations {other} and {index} of rank {program.rank} race for the same memory")
        for cell in reads:
            readers[cell].append(index)
        for cell in writes:
            writers[cell].append(index)


class _Values:
    """The values that a cell may hold: inputs and sums of two values, numbered so that equal numbers are equal bits.

    a + b and b + a have the same bits; (a + b) + c and a + (b + c) have not.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}
        self.blocks: list[int] = []
        self.ranks: list[int] = []

    def input(self, rank: int, block: int, chunk: int) -> int:
        """Rank's own data of a block's chunk."""
        return self._number((-1, rank, block, chunk), block, 1 << rank)

    def sum(self, first: int, second: int) -> int:
        """The sum of two values of the same block, of which no rank has part in both."""
        if self.blocks[first] != self.blocks[second]:
            raise ProgramError(f"block {self.blocks[first]} is added to block {self.blocks[second]}")
        if self.ranks[first] & self.ranks[second]:
            raise ProgramError(f"a contribution to block {self.blocks[first]} is added twice")
        key = (min(first, second), max(first, second))
        return self._number(key, self.blocks[first], self.ranks[first] | self.ranks[second])

    def _number(self, key: tuple[int, ...], block: int, ranks: int) -> int:
        number = self._numbers.setdefault(key, len(self.blocks))
        if number == len(self.blocks):
            self.blocks.append(block)
            self.ranks.append(ranks)
        return number


class _Execution:
    """All programs run together on symbols, one operation at a time, in an order drawn by lot."""

    def __init__(
        self,
        programs: Sequence[Program],
        senders: dict[Event, Event],
        accesses: list[list[Access]],
        shared: bool,
        values: _Values,
    ) -> None:
        self.programs, self.senders, self.accesses, self.shared = programs, senders, accesses, shared
        self.values = values
        self.receiver = {send: receive for receive, send in senders.items()}
        self.memory: list[dict[int, int]] = [{} for _ in programs]
        self.messages: dict[Event, list[int]] = {}
        self.arrived: list[Counter[int]] = [Counter() for _ in programs]
        for rank, program in enumerate(programs):
            for block, (buffer, slot) in inputs(program.collective, rank, program.size, program.root).items():
                places = _memory(program, (Span(buffer, slot, block),), -1, shared)
                self.memory[rank].update(
                    (place, values.input(rank, block, chunk)) for chunk, place in enumerate(places)
                )

    def run(self, lot: random.Random) -> list[list[int]]:
        """Run everything; the values of each rank's OUTPUT, which are checked."""
        waits: dict[Event, int] = {}
        followers: dict[Event, list[Event]] = defaultdict(list)
        for rank, program in enumerate(self.programs):
            for index, op in enumerate(program.ops):
                event = rank, index
                waits[event] = len(op.after) + (event in self.senders)
                for wait in op.after:
                    followers[rank, wait].append(event)
                if event in self.receiver:
                    followers[event].append(self.receiver[event])
        ready = [event for event, count in waits.items() if not count]
        while ready:
            place = lot.randrange(len(ready))
            ready[place], ready[-1] = ready[-1], ready[place]
            event = ready.pop()
            self._do(event)
            for follower in followers[event]:
                waits[follower] -= 1
                if not waits[follower]:
                    ready.append(follower)
        return [self._output(program) for program in self.programs]

    def _do(self, event: Event) -> None:
        rank, index = event
        memory, op = self.memory[rank], self.programs[rank].ops[index]
        reads, writes = self.accesses[rank][index]
        try:
            data = [memory[cell] for cell in reads]
        except KeyError as error:
            raise ProgramError(f"operation {index} of rank {rank} reads memory that is not set") from error
        if op.kind is Kind.SEND:
            self.messages[event] = data
            return
        if op.kind is Kind.RECV:
            data = self.messages.pop(self.senders[event])
            self.arrived[rank].update(self.values.blocks[value] for value in data)
        elif op.kind is Kind.REDUCE:
            received = self.messages.pop(self.senders[event])
            data = [self.values.sum(mine, other) for mine, other in zip(data, received, strict=True)]
        memory.update(zip(writes, data, strict=True))

    def _output(self, program: Program) -> list[int]:
        """The values in a rank's OUTPUT: the right blocks, complete, each come once."""
        rank, size, collective = program.rank, program.size, program.collective
        blocks = [rank] if collective == "reduce_scatter" else list(range(size))
        spans = tuple(Span(Buffer.OUTPUT, slot, block) for slot, block in enumerate(blocks))
        found = [self.memory[rank].get(cell, -1) for cell in _memory(program, spans, -1, self.shared)]
        everybody = (1 << size) - 1
        for place, value in enumerate(found):
            block, chunk = blocks[place // program.chunks], place % program.chunks
            if collective == "all_gather":
                right = value == self.values.input(block, block, chunk)
            elif collective == "broadcast":
                right = value == self.values.input(program.root, block, chunk)
            else:
                right = value >= 0 and (self.values.blocks[value], self.values.ranks[value]) == (block, everybody)
            if not right:
                raise ProgramError(f"rank {rank} ends with something wrong in chunk {chunk} of block {block}")
        if collective in ("all_gather", "broadcast"):
            held = inputs(collective, rank, size, program.root)
            once = Counter({block: program.chunks for block in blocks if block not in held})
            if self.arrived[rank] != once:
                raise ProgramError(f"rank {rank} receives some block not at all or more than once")
        return found
