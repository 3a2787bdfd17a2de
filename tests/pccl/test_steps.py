"""Programs cut into groups of messages: proved by the checker of programs, groups standing in for operations."""

from __future__ import annotations

import pytest

from axonn_plugins.pccl.algorithms import algorithms
from axonn_plugins.pccl.check import check
from axonn_plugins.pccl.graph import ProgramError
from axonn_plugins.pccl.program import Buffer as B
from axonn_plugins.pccl.program import Kind, Op, Program, Span
from axonn_plugins.pccl.steps import Step, barred, cut
from tests.matrix import thorough
from tests.pccl.test_algorithms import UNEVEN, bruck_chain, dealt, log_steps, node_major, programs_of

MAPS = [
    *((tuple(range(size)),) for size in (1, 2, 3, 4, 7)),
    *(thorough((tuple(range(size)),)) for size in (5, 8, 16)),
    *(node_major(*shape) for shape in ((2, 2), (3, 2))),
    *(thorough(node_major(*shape)) for shape in ((4, 2), (5, 3), (4, 4), (6, 4))),
    *(nodes if place in (0, 3) else thorough(nodes) for place, nodes in enumerate(UNEVEN)),
    dealt(6),
    *(thorough(dealt(size)) for size in (9, 13, 20)),
]


@pytest.mark.parametrize("nodes", MAPS, ids=str)
def test_groups_of_messages_cannot_lock_and_give_what_the_program_gives(nodes) -> None:
    size = sum(map(len, nodes))
    for collective in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
        for place, name in enumerate(algorithms(collective, size)):
            options = {"root": size // 2} if collective == "broadcast" else {}
            for chunks in (1, 3) if size <= 8 else (1 + place % 2,):
                programs = programs_of(name, collective, nodes, chunks, **options)
                steps = cut(programs)
                grouped = [barred(program, mine) for program, mine in zip(programs, steps, strict=True)]
                check(grouped, nodes, orders=1)
                for program, mine in zip(programs, steps, strict=True):
                    assert _count(mine) == [
                        ("messages", sum(op.kind is not Kind.COPY for op in program.ops)),
                        ("locals", sum(op.kind in (Kind.COPY, Kind.REDUCE) for op in program.ops)),
                    ]


def _count(steps: tuple[Step, ...]) -> list[tuple[str, int]]:
    return [(what, len({each for step in steps for each in getattr(step, what)})) for what in ("messages", "locals")]


@pytest.mark.parametrize("size", [2, 3, 5, 8, thorough(16)])
def test_as_many_groups_as_the_algorithm_has_steps(size: int) -> None:
    wanted = {"ring": size - 1, "direct": 1, "bruck": bruck_chain(size), "recursive": log_steps(size)}
    for name in wanted.keys() & algorithms("all_gather", size).keys():
        for collective, times in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
            for mine in cut(programs_of(name, collective, [range(size)])):
                assert sum(bool(step.messages) for step in mine) <= times * wanted[name], (name, collective)


def test_a_rank_groups_what_both_ends_are_ready_for() -> None:
    """Rank 1's send to 2 waits for nothing there, but rank 2 takes it only after it was served by rank 0."""
    slot = Span(B.WORK, 0, 0), Span(B.WORK, 1, 1)
    programs = [
        Program("all_gather", 0, 3, 1, 2, (Op(Kind.SEND, 2, src=slot[:1]),)),
        Program("all_gather", 1, 3, 1, 2, (Op(Kind.SEND, 2, src=slot[1:]), Op(Kind.COPY, -1, slot[:1], slot[1:]))),
        Program("all_gather", 2, 3, 1, 2, (Op(Kind.RECV, 0, slot[:1]), Op(Kind.RECV, 1, slot[1:], after=(0,)))),
    ]
    steps = cut(programs)
    assert steps == [(Step((0,), ()),), (Step((), (1,)), Step((0,), ())), (Step((0,), ()), Step((1,), ()))]


def test_messages_that_wait_for_each_other_are_refused() -> None:
    one, two = Span(B.WORK, 0, 0), Span(B.WORK, 1, 1)
    ring = [
        Program(
            "all_gather",
            rank,
            2,
            1,
            2,
            (
                Op(Kind.RECV, 1 - rank, dst=((two, one)[rank],)),
                Op(Kind.SEND, 1 - rank, src=((one, two)[rank],), after=(0,)),
            ),
        )
        for rank in (0, 1)
    ]
    with pytest.raises(ProgramError, match="deadlock"):
        cut(ring)
