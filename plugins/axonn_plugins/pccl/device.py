"""Programs on tensors of an accelerator, cut into steps (`axonn_plugins.pccl.steps`), with places in memory for blocks.

`csrc/schedule.cpp` enqueues them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from axonn_plugins.pccl.program import Buffer, Kind, Op, Program, Span, cells, chunk_bounds
from axonn_plugins.pccl.steps import Step, cut

Region = tuple[Buffer, int, int]
"""Buffer, first element, elements."""


@dataclass(frozen=True, eq=False)
class Plan:
    """A rank's part of a collective, cut into steps; each is its own key."""

    program: Program
    steps: tuple[Step, ...]


def plan(make: Callable[[int], Program], rank: int, size: int) -> Plan:
    """The plan of `rank`, from all ranks' programs `make(rank)`: both ends of a message must be in the same step."""
    programs = [make(other) for other in range(size)]
    return Plan(programs[rank], cut(programs)[rank])


@dataclass(frozen=True)
class Layout:
    """Where blocks lie, in elements.

    Attributes:
        lengths: of each block.
        inputs: where each slot of INPUT begins.
        outputs: where each slot of OUTPUT begins.
    """

    lengths: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """A message, or a copy, between memory regions."""

    kind: Kind
    peer: int
    length: int
    dst: tuple[Region, ...]
    src: tuple[Region, ...]


Numbered = dict[int, Transfer]
Resolved = tuple[tuple[Numbered, Numbered], ...]
"""Slots that the messages and the local operations of each step move, by their numbers in the program."""


def resolve(plan: Plan, layout: Layout) -> Resolved:
    """The plan's steps for blocks of these lengths; messages without elements are left out, at both ends."""

    def transfers(numbers: Iterable[int]) -> Numbered:
        made = {number: _transfer(plan.program.ops[number], plan.program.chunks, layout) for number in numbers}
        return {number: each for number, each in made.items() if each.length}

    return tuple((transfers(step.messages), transfers(step.locals)) for step in plan.steps)


def _transfer(op: Op, chunks: int, layout: Layout) -> Transfer:
    dst, src = (_regions(spans, op.chunk, chunks, layout) for spans in (op.dst, op.src))
    return Transfer(op.kind, op.peer, sum(length for _, _, length in dst or src), dst, src)


def _regions(spans: tuple[Span, ...], chunk: int, chunks: int, layout: Layout) -> tuple[Region, ...]:
    """The spans' memory, in order, in as few pieces as can be."""
    longest = max(layout.lengths)
    found: list[Region] = []
    for buffer, slot, block in cells(spans):
        start = slot * longest if buffer is Buffer.WORK else (layout.inputs, layout.outputs)[buffer][slot]
        first, end = chunk_bounds(layout.lengths[block], chunks, chunk)
        if first == end:
            continue
        if found and found[-1][0] is buffer and sum(found[-1][1:]) == start + first:
            found[-1] = buffer, found[-1][1], found[-1][2] + end - first
        else:
            found.append((buffer, start + first, end - first))
    return tuple(found)


def rows(steps: Resolved, rank: int, peers: Sequence[int]) -> list[tuple[list[tuple], list[tuple]]]:
    """The same for the C++ `Route`.

    Args:
        steps: what to do.
        rank: this rank's number in the program.
        peers: the rank in the library's group of each rank of the program.
    """

    def row(number: int, each: Transfer) -> tuple:
        peer = peers[each.peer] if each.peer >= 0 else -1
        spans = ([(int(buffer), *rest) for buffer, *rest in regions] for regions in (each.dst, each.src))
        return number, int(each.kind), peer, rank < each.peer, each.length, *spans

    return [
        ([row(*item) for item in messages.items()], [row(*item) for item in local.items()]) for messages, local in steps
    ]
