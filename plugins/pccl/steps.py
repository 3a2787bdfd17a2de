"""Programs cut into steps, for libraries that take messages in groups only, as NCCL does.

Such a library begins a group of sends and receives when the one before has ended, and ends it when every message of it
has been taken. Each message is given one level, the same for both its ends: one more than the highest level among all
that either end waits for. A rank's step l is its messages of level l. By induction no order of ranks can lock: when all
steps below l have ended everywhere, both ends of every message of level l stand in a step that can begin.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from plugins.pccl.graph import Event, ProgramError, match
from plugins.pccl.program import Kind, Op, Program


@dataclass(frozen=True)
class Step:
    """What a rank does between two waits.

    Attributes:
        messages: SEND, RECV and REDUCE operations, to be given to the library as one group, in this order.
        copies: COPY operations that follow, one after the other.
    """

    messages: tuple[Op, ...]
    copies: tuple[Op, ...]


def cut(programs: Sequence[Program]) -> list[tuple[Step, ...]]:
    """Each rank's steps. A rank that has nothing to do at some level has no step for it.

    Args:
        programs: those of all ranks of one collective.

    Raises:
        ProgramError: the programs' messages do not match, or wait for each other in a circle.
    """
    levels = _levels(programs)
    found = []
    for rank, program in enumerate(programs):
        by_level: dict[int, tuple[list[Op], list[Op]]] = defaultdict(lambda: ([], []))
        for index, op in enumerate(program.ops):
            by_level[levels[rank, index]][op.kind is Kind.COPY].append(op)
        found.append(tuple(Step(tuple(m), tuple(c)) for _, (m, c) in sorted(by_level.items())))
    return found


def barred(program: Program, steps: Sequence[Step]) -> Program:
    """The program that steps amount to: every operation waits for all of the step before.

    `plugins.pccl.check.check` then proves values, races and, with sends that end only when they are taken, that
    groups cannot lock.
    """
    ops: list[Op] = []
    before: tuple[int, ...] = ()
    for step in steps:
        if step.messages:
            first = len(ops)
            ops += [replace(op, after=before) for op in step.messages]
            before = tuple(range(first, len(ops)))
        for op in step.copies:
            ops.append(replace(op, after=before))
            before = (len(ops) - 1,)
    return replace(program, ops=tuple(ops))


def _levels(programs: Sequence[Program]) -> dict[Event, int]:
    """A level for every operation: from 1 for messages, and for a COPY that of the last it waits for."""
    senders = match(programs)
    partner = senders | {send: receive for receive, send in senders.items()}
    waits: dict[Event, int] = {}
    followers: dict[Event, list[Event]] = defaultdict(list)
    for rank, program in enumerate(programs):
        for index, op in enumerate(program.ops):
            waits[rank, index] = len(op.after)
            for earlier in op.after:
                followers[rank, earlier].append((rank, index))
    levels = dict.fromkeys(waits, 0)  # so far: the highest among what an operation waits for
    ready = [event for event, count in waits.items() if not count]
    done = 0
    while ready:
        event = ready.pop()
        other = partner.get(event)
        if other is not None:
            if waits[other]:
                continue  # the end that is ready last takes both
            levels[event] = levels[other] = 1 + max(levels[event], levels[other])
        for each in (event,) if other is None else (event, other):
            waits[each] = -1
            done += 1
            for follower in followers[each]:
                levels[follower] = max(levels[follower], levels[each])
                waits[follower] -= 1
                if not waits[follower]:
                    ready.append(follower)
    if done < len(levels):
        raise ProgramError(f"deadlock: {len(levels) - done} of {len(levels)} operations wait for each other")
    return levels
