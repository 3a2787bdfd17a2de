"""Programs cut into steps, for libraries that take messages in groups only, as NCCL does.

Such a library begins a group of sends and receives when the one before has ended, and ends it when every message of it
has been taken. Each message is given one level, the same for both its ends: one more than the highest level among all
that its sender waits for and, where it is received in place, its receiver. A rank's step l is its messages of level l,
then what can be copied and added with them. By induction no order of ranks can lock: when all steps below l have ended
everywhere, both ends of every message of level l stand in a step that can begin.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from axonn_plugins.pccl.graph import Event, ProgramError, match
from axonn_plugins.pccl.program import Buffer, Kind, Op, Program, Span, cells


@dataclass(frozen=True)
class Step:
    """The work of a rank between two waits, by the operations' numbers in its program.

    Attributes:
        messages: SEND, RECV and REDUCE, to be given to the library as one group in this order; what a REDUCE receives
            is kept aside, so that it waits for nothing.
        locals: COPY and REDUCE, which adds what was kept, one after the other.
    """

    messages: tuple[int, ...]
    locals: tuple[int, ...]


def cut(programs: Sequence[Program]) -> list[tuple[Step, ...]]:
    """Each rank's steps. A rank that has nothing to do at some level has no step for it.

    Args:
        programs: those of all ranks of one collective.

    Raises:
        ProgramError: the programs' messages do not match, or wait for each other in a circle.
    """
    senders = match(programs)
    levels = _levels(programs, senders)
    found = []
    for rank, program in enumerate(programs):
        by_level: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for index, op in enumerate(program.ops):
            event = rank, index
            if op.kind is not Kind.COPY:
                by_level[levels[senders.get(event, event)]][0].append(index)
            if op.kind in (Kind.COPY, Kind.REDUCE):
                by_level[levels[event]][1].append(index)
        found.append(tuple(Step(tuple(m), tuple(done)) for _, (m, done) in sorted(by_level.items())))
    return found


def barred(program: Program, steps: Sequence[Step]) -> Program:
    """The program that steps amount to: every operation waits for all of the step before.

    A REDUCE becomes a RECV into a place of its own and, when it is added, a message of the rank to itself. So
    `axonn_plugins.pccl.check.check` proves values and races and, with sends that end only when they are taken, that groups
    cannot lock.
    """
    ops: list[Op] = []
    before: tuple[int, ...] = ()
    kept: dict[int, tuple[Span, ...]] = {}
    slots = program.work_slots

    def add(*added: Op) -> None:
        nonlocal before
        ops.extend(replace(op, after=before) for op in added)
        before = tuple(range(len(ops) - len(added), len(ops)))

    for step in steps:
        messages = []
        for index in step.messages:
            op = program.ops[index]
            if op.kind is Kind.REDUCE:
                blocks = [block for _, _, block in cells(op.dst)]
                kept[index] = tuple(Span(Buffer.WORK, slots + place, block) for place, block in enumerate(blocks))
                slots += len(blocks)
                op = replace(op, kind=Kind.RECV, dst=kept[index], src=())
            messages.append(op)
        if messages:
            add(*messages)
        for index in step.locals:
            op = program.ops[index]
            if op.kind is Kind.REDUCE:
                add(
                    replace(op, kind=Kind.SEND, peer=program.rank, dst=(), src=kept[index]),
                    replace(op, peer=program.rank),
                )
            else:
                add(op)
    return replace(program, ops=tuple(ops), work_slots=slots)


def _levels(programs: Sequence[Program], senders: dict[Event, Event]) -> dict[Event, int]:
    """Every operation's level: of SEND and RECV from 1; of COPY, and of a REDUCE's sum, that of the last it waits for."""
    receivers = {send: receive for receive, send in senders.items()}
    waits: dict[Event, int] = {}
    followers: dict[Event, list[Event]] = defaultdict(list)
    for rank, program in enumerate(programs):
        for index, op in enumerate(program.ops):
            event = rank, index
            before = [(rank, earlier) for earlier in op.after]
            if op.kind is Kind.REDUCE:
                before.append(senders[event])
            elif op.kind is Kind.RECV:  # has its sender's level, and the sender waits for what it waits for
                event = senders[event]
            waits[event] = waits.get(event, 0) + len(before)
            for earlier in before:
                followers[earlier].append(event)
    levels = dict.fromkeys(waits, 0)
    ready = [event for event, count in waits.items() if not count]
    done = 0
    while ready:
        event = ready.pop()
        done += 1
        same = [event]
        if programs[event[0]].ops[event[1]].kind is Kind.SEND:
            levels[event] += 1
            receive = receivers[event]
            if programs[receive[0]].ops[receive[1]].kind is Kind.RECV:
                levels[receive] = levels[event]
                same.append(receive)
        for each in same:
            for follower in followers[each]:
                levels[follower] = max(levels[follower], levels[event])
                waits[follower] -= 1
                if not waits[follower]:
                    ready.append(follower)
    if done < len(waits):
        raise ProgramError(f"deadlock: {len(waits) - done} of {len(waits)} operations wait for each other")
    return levels
