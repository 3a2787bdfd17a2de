"""Programs on tensors of an accelerator: messages by groups of the vendor's library, sums and copies by torch.

A program is cut into steps (`axonn_plugins.pccl.steps`). A step's messages are one group of sends and receives of an inner
backend of torch.distributed (NCCL's; gloo's where a test stands in for it), in which each waits for the others; what
was received is then added where it belongs. All of it is enqueued on the current stream, and nothing waits on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_plugins.pccl.program import Buffer, Kind, Op, Program, Span, cells, chunk_bounds
from axonn_plugins.pccl.steps import Step, cut

Combine = Callable[..., Tensor]
Region = tuple[Buffer, int, int]
"""Buffer, first element, elements."""

_OPS: Any = dist.ReduceOp.RedOpType
AVERAGE = int(_OPS.AVG)
COMBINE: dict[int, Combine] = {
    int(_OPS.SUM): torch.add,
    AVERAGE: torch.add,
    int(_OPS.PRODUCT): torch.mul,
    int(_OPS.MIN): torch.minimum,
    int(_OPS.MAX): torch.maximum,
}
"""The operation that combines two contributions, by torch's number of the reduction; an average is divided at the end."""


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


@lru_cache(maxsize=256)
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


class Memory:
    """The buffers of one call: flat tensors of one type on one device."""

    def __init__(self, plan: Plan, layout: Layout, input: Tensor, output: Tensor) -> None:
        work = output.new_empty(plan.program.work_slots * max(layout.lengths))
        self._buffers = {Buffer.INPUT: input, Buffer.OUTPUT: output, Buffer.WORK: work}

    def view(self, region: Region) -> Tensor:
        """A region as a tensor."""
        buffer, start, length = region
        return self._buffers[buffer].narrow(0, start, length)

    def take(self, regions: Sequence[Region]) -> Tensor:
        """The regions one after the other: a view where it is one, else a copy."""
        views = [self.view(region) for region in regions]
        return views[0] if len(views) == 1 else torch.cat(views)

    def put(self, regions: Sequence[Region], data: Tensor) -> None:
        """Write data that `take` gave into regions."""
        views = [self.view(region) for region in regions]
        parts = list(data.split([length for _, _, length in regions]))
        if len(views) > 1 or views[0].data_ptr() != data.data_ptr():
            torch._foreach_copy_(views, parts)

    def empty(self, length: int) -> Tensor:
        """Room for a message."""
        return self._buffers[Buffer.OUTPUT].new_empty(length)


def execute(steps: Resolved, memory: Memory, rank: int, combine: Combine, inner: Any, peers: Sequence[int]) -> None:
    """Enqueue all steps on the current stream.

    Args:
        steps: what to do.
        memory: on what.
        rank: this rank's number in the program.
        combine: like `torch.add`.
        inner: the backend that messages go by.
        peers: the rank in `inner` of each rank of the program.
    """
    kept: dict[int, Tensor] = {}
    for messages, local in steps:
        sends = [(peers[each.peer], memory.take(each.src)) for each in messages.values() if each.kind is Kind.SEND]
        taken = {number: _place(each, memory) for number, each in messages.items() if each.kind is not Kind.SEND}
        exchange(inner, sends, [(peers[messages[number].peer], data) for number, data in taken.items()])
        for number, data in taken.items():
            if messages[number].kind is Kind.REDUCE:
                kept[number] = data
            elif len(messages[number].dst) > 1:
                memory.put(messages[number].dst, data)
        for number, each in local.items():
            if each.kind is Kind.REDUCE:
                _reduce(each, kept.pop(number), memory, combine, first=rank < each.peer)
            else:
                memory.put(each.dst, memory.take(each.src))


def _place(message: Transfer, memory: Memory) -> Tensor:
    """Where a message is received: in place where that is in one piece and nothing need be added."""
    whole = message.kind is Kind.RECV and len(message.dst) == 1
    return memory.view(message.dst[0]) if whole else memory.empty(message.length)


def _reduce(message: Transfer, data: Tensor, memory: Memory, combine: Combine, first: bool) -> None:
    """Write src (+) data to dst, the lower rank's on the left: even max(-0, 0) has the same bits on both sides then."""
    mine = memory.take(message.src)
    direct = len(message.dst) == 1
    out = memory.view(message.dst[0]) if direct else data
    combine(*((mine, data) if first else (data, mine)), out=out)
    if not direct:
        memory.put(message.dst, data)


def exchange(inner: Any, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
    """Send and receive at once, as bytes; what follows on the current stream finds it done."""
    calls = [partial(inner.recv, [data.view(torch.uint8)], peer, 0) for peer, data in receives]
    calls += [partial(inner.send, [data.view(torch.uint8)], peer, 0) for peer, data in sends]
    grouped(inner, calls)


def grouped(inner: Any, calls: Sequence[Callable[[], Any]]) -> None:
    """Make calls of a backend as one group, and let the current stream (on the CPU: the caller) wait for all."""
    if not calls:
        return
    if inner.supports_coalescing:
        inner._start_coalescing()
        for call in calls:
            call()
        inner._end_coalescing().wait()
    else:
        for work in [call() for call in calls]:
            work.wait()
