"""Every schedule, for every size: proved right, and as many steps and bytes as the table of algorithms says."""

from __future__ import annotations

import random
from dataclasses import replace
from math import ceil, log2

import pytest

from axonn_plugins.pccl.algorithms import BETWEEN, WITHIN, algorithms
from axonn_plugins.pccl.algorithms.hierarchical import Lanes
from axonn_plugins.pccl.check import check
from axonn_plugins.pccl.graph import ProgramError, Report
from axonn_plugins.pccl.program import Kind, Program, block_lengths, chunk_bounds, flatten
from tests.matrix import thorough

EVERY_RUN = {*range(1, 9), 13, 16, 24}
SIZES = [size if size in EVERY_RUN else thorough(size) for size in range(1, 65)]
DATA = ("all_gather", "reduce_scatter", "all_reduce")
EVEN = [
    (2, 2),
    (3, 2),
    (4, 2),
    (2, 3),
    (7, 3),
    thorough((8, 2)),
    thorough((2, 4)),
    thorough((4, 4)),
    thorough((16, 2)),
    thorough((5, 3)),
    thorough((6, 4)),
    thorough((8, 4)),
    thorough((16, 4)),
    thorough((8, 8)),
]
UNEVEN = [
    ((0, 1), (2,)),
    ((0,), (1, 2, 3, 4, 5, 6)),
    ((0, 5), (2,), (7, 1, 3), (4, 6)),
    ((0, 5), (2, 8), (7, 1, 3, 9, 10), (4, 6)),
    ((3, 2, 1, 0), (4, 5, 6), (9, 8, 7, 11, 10)),
]


def node_major(nodes: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(node * ranks, (node + 1) * ranks)) for node in range(nodes))


def dealt(size: int) -> tuple[tuple[int, ...], ...]:
    """Some uneven grouping of shuffled ranks, always the same for a size."""
    lot = random.Random(size)
    ranks = lot.sample(range(size), size)
    cuts = sorted(lot.sample(range(1, size), min(size - 1, lot.randrange(1, 9)))) if size > 1 else []
    return tuple(tuple(ranks[a:b]) for a, b in zip([0, *cuts], [*cuts, size], strict=True))


def programs_of(name: str, collective: str, nodes, chunks: int = 1, **options) -> list[Program]:
    size = sum(len(node) for node in nodes)
    make = algorithms(collective, size)[name]
    return [make(collective, rank, size, nodes, chunks, **options) for rank in range(size)]


def checked(name: str, collective: str, nodes, chunks: int = 1, orders: int = 1, **options) -> Report:
    return check(programs_of(name, collective, nodes, chunks, **options), nodes, orders=orders)


def phases(collective: str) -> int:
    """An all-reduce is a reduce-scatter and an all-gather: twice the steps and bytes."""
    return 2 if collective == "all_reduce" else 1


def log_steps(members: int) -> int:
    return ceil(log2(members))


def bruck_chain(members: int) -> int:
    """Bruck's last message may hold so few parts that it need not wait for the one before."""
    if members == 1:
        return 0
    last = 1 << (log_steps(members) - 1)
    return max(log_steps(members) - 1, 1 + log_steps(members - last))


def chunks_for(size: int) -> tuple[int, ...]:
    return (1, 2, 3, 4) if size <= 8 else (1 + size % 4,) if size <= 16 else (1,)


@pytest.mark.parametrize("size", SIZES)
def test_flat(size: int) -> None:
    logarithm = log_steps(size)
    costs = {  # steps, messages
        "ring": (size - 1, size - 1),
        "bruck": (bruck_chain(size), logarithm),
        "direct": (min(size - 1, 1), size - 1),
        "recursive": (logarithm, logarithm),
    }
    for place, collective in enumerate(DATA):
        for name in costs.keys() & algorithms(collective, size).keys():
            if size > 20 and name in ("ring", "direct") and place != (2 if size % 13 == 0 else size % 2):
                continue  # p^2 messages each: one collective at a time
            for chunks in chunks_for(size):
                found = checked(name, collective, [range(size)], chunks)
                times = phases(collective)
                steps, messages = costs[name]
                assert found.steps == times * steps, name
                assert set(found.messages) == {times * chunks * messages}, name
                assert set(found.sent) == {times * chunks * (size - 1)}, name
    assert ("recursive" in algorithms("all_gather", size)) == (size.bit_count() == 1)


@pytest.mark.parametrize("size", SIZES)
def test_tiny(size: int) -> None:
    chunks = chunks_for(size)[-1]
    found = checked("tiny", "all_reduce", [range(size)], chunks)
    rounds = size.bit_length() - 1
    folded = size != 1 << rounds
    assert rounds + folded <= found.steps <= rounds + 2 * folded
    assert max(found.sent) == (rounds + folded) * size * chunks


@pytest.mark.parametrize("ranks", EVEN, ids=lambda ranks: "x".join(map(str, ranks)))
def test_hierarchical(ranks: tuple[int, int]) -> None:
    count, local = ranks
    size = count * local
    far = {"ring": count - 1, "log": bruck_chain(count), "direct": 1, "radix4": {2: 1, 3: 1, 4: 1, 5: 1}.get(count, 2)}
    near = {"ring": local - 1, "direct": 1}
    for place, collective in enumerate(DATA):
        times = phases(collective)
        chunks = 2 if ranks == (8, 4) else chunks_for(size)[-1]
        for turn, between in enumerate(BETWEEN):
            for within in WITHIN:
                if size > 20 and (turn + place + (within == "ring")) % 2:
                    continue  # every algorithm, and every pattern with every collective, but not every combination
                found = checked(f"hierarchical_{between}_{within}", collective, node_major(count, local), chunks)
                assert found.far_steps == times * far[between]
                assert found.steps == times * (far[between] + near[within])
                # (N - 1)B between nodes and (M - 1)NB within, of n = NMB: (N - 1)/N of n on each node's link.
                assert set(found.sent) == {times * chunks * (count - 1 + (local - 1) * count)}
                assert set(found.out) == set(found.into) == {times * chunks * (count - 1) * local}


@pytest.mark.parametrize("ranks", EVEN, ids=lambda ranks: "x".join(map(str, ranks)))
def test_hierarchical_doubling(ranks: tuple[int, int]) -> None:
    count, local = ranks
    found = checked("hierarchical_doubling_direct", "all_reduce", node_major(count, local), chunks=2)
    rounds = count.bit_length() - 1
    folded = count != 1 << rounds
    assert rounds + folded <= found.far_steps <= rounds + 2 * folded
    assert found.steps == found.far_steps + 2
    assert max(found.out) == 2 * (rounds + folded) * count * local


@pytest.mark.parametrize("ranks", EVEN, ids=lambda ranks: "x".join(map(str, ranks)))
def test_led(ranks: tuple[int, int]) -> None:
    count, local = ranks
    nodes = node_major(count, local)
    far = {"ring": (count - 1, count - 1), "log": (bruck_chain(count), log_steps(count)), "direct": (1, count - 1)}
    for collective in DATA:
        times = phases(collective)
        for between, (steps, messages) in far.items():
            found = checked(f"led_{between}", collective, nodes)
            assert found.far_steps == times * steps
            assert found.steps == times * steps + 2
            for rank, sent in enumerate(found.messages):
                assert sent == (1 if rank % local else times * messages + local - 1)
            # As many bytes between nodes as with every rank at work.
            assert set(found.out) == set(found.into) == {times * (count - 1) * local}
    rounds = count.bit_length() - 1
    folded = count != 1 << rounds
    found = checked("led_doubling", "all_reduce", nodes, chunks=2)
    assert rounds + folded <= found.far_steps == found.steps - 2 <= rounds + 2 * folded
    assert max(found.out) == 2 * (rounds + folded) * count * local


@pytest.mark.parametrize(
    ("chunks", "nodes"),
    [*((1, nodes) for nodes in (UNEVEN[1], UNEVEN[4])), *((3, nodes) for nodes in (UNEVEN[0], UNEVEN[2]))]
    + [thorough(1, UNEVEN[at]) for at in (0, 2, 3)]
    + [thorough(3, UNEVEN[at]) for at in (1, 3, 4)],
    ids=str,
)
def test_uneven_nodes(nodes, chunks: int) -> None:
    size = sum(len(node) for node in nodes)
    foreign = [(size - len(node)) * chunks for node in nodes]
    for collective in DATA:
        for name in algorithms(collective, size):
            found = checked(name, collective, nodes, chunks, orders=2)
            if name.startswith(("hierarchical", "led")) and "doubling" not in name:
                # A node's link brings each foreign block in once, or takes each foreign block's sum out once.
                assert collective == "reduce_scatter" or sum(found.into) == phases(collective) * sum(foreign)
                assert collective != "all_gather" or found.into == foreign
                assert collective != "reduce_scatter" or found.out == foreign


@pytest.mark.parametrize("size", SIZES)
def test_any_grouping(size: int) -> None:
    nodes = dealt(size)
    for place, collective in enumerate(DATA):
        names = [name for name in algorithms(collective, size) if name.startswith(("hierarchical", "led"))]
        for name in names if size <= 12 else [names[(size + place) % len(names)]]:
            checked(name, collective, nodes, chunks=1 + size % 4)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 13, *map(thorough, (8, 16, 31, 64))])
def test_broadcast(size: int) -> None:
    for nodes in ([tuple(range(size))], dealt(size)):
        for root in {0, size // 2, size - 1}:
            for chunks in (1, 3) if size <= 16 else (2,):
                tree = checked("binomial", "broadcast", nodes, chunks, root=root)
                within = max(log_steps(len(node)) for node in nodes)
                assert tree.steps <= log_steps(len(nodes)) + within
                line = checked("chain", "broadcast", nodes, chunks, root=root)
                assert line.steps <= len(nodes) - 1 + within
                assert max(line.out) <= size * chunks


def test_a_ring_crosses_each_link_between_nodes_once() -> None:
    nodes = ((5, 0), (1, 4), (2, 3))
    found = checked("ring", "all_gather", nodes)
    assert set(found.out) == {5}


def test_what_leaves_the_node_comes_first() -> None:
    nodes = node_major(4, 4)
    gathered = programs_of("hierarchical_log_direct", "all_gather", nodes, chunks=2)[5]
    peers = [op.peer for op in gathered.ops if op.kind is Kind.SEND]
    assert all(peer // 4 != 1 for peer in peers[:4])
    summed = programs_of("hierarchical_log_direct", "reduce_scatter", nodes, chunks=2)[5]
    first = next(index for index, op in enumerate(summed.ops) if op.kind is Kind.SEND and op.peer // 4 != 1)
    # The first step between nodes sends half the lane's blocks, one of two chunks: no other sum is waited for.
    assert sum(op.kind is Kind.REDUCE for op in summed.ops[:first]) == 3


def test_a_chunk_waits_for_its_own_arrival_only() -> None:
    for rank, program in enumerate(programs_of("hierarchical_log_direct", "all_gather", node_major(4, 2), chunks=4)):
        for op in program.ops:
            assert all(program.ops[wait].chunk == op.chunk for wait in op.after), rank


def test_work_slots() -> None:
    """A ring needs few; halving and the lanes of a hierarchy hold partial sums of what they have not sent yet."""
    nodes = node_major(8, 4)

    def work_slots(name: str, collective: str) -> int:
        return algorithms(collective, 32)[name](collective, 0, 32, nodes, 1).work_slots

    slots = {name: work_slots(name, "reduce_scatter") for name in algorithms("reduce_scatter", 32)}
    assert slots["ring"] == 4 and slots["direct"] == 0 and slots["bruck"] == 15
    assert slots["hierarchical_log_direct"] == slots["hierarchical_ring_direct"] == 7
    for name in algorithms("all_gather", 32):
        assert work_slots(name, "all_gather") == work_slots(name, "all_reduce") == 0


def test_lanes_share_a_node_s_blocks() -> None:
    lanes = Lanes(UNEVEN[3])
    assert lanes.count == 2
    assert [[len(part) for part in parts] for parts in lanes.parts] == [[1, 1, 3, 1], [1, 1, 2, 1]]
    assert lanes.extra(2) == [(3, 7), (9, 1), (10, 7)]


def test_lengths() -> None:
    assert block_lengths(11, 4) == [3, 3, 3, 2] and block_lengths(2, 3) == [1, 1, 0]
    assert [chunk_bounds(7, 3, chunk) for chunk in (0, 1, 2, -1)] == [(0, 2), (2, 4), (4, 7), (0, 7)]
    uneven = check(programs_of("ring", "all_reduce", [range(4)], chunks=3), lengths=block_lengths(11, 4))
    assert sum(uneven.sent) == 2 * 3 * 11


def test_flatten() -> None:
    program = programs_of("hierarchical_log_direct", "all_reduce", UNEVEN[2], chunks=2)[7]
    flat = flatten(program)
    rows = [flat["ops"][first : first + 9] for first in range(0, len(flat["ops"]), 9)]
    spans = [tuple(flat["spans"][first : first + 4]) for first in range(0, len(flat["spans"]), 4)]
    assert (flat["size"], flat["rank"], flat["chunks"], flat["work_slots"]) == ([8], [7], [2], [0])
    waited = 0
    for op, (kind, peer, tag, chunk, dst, dsts, src, srcs, waits) in zip(program.ops, rows, strict=True):
        assert (kind, peer, chunk) == (op.kind, op.peer, op.chunk)
        earlier = program.ops[: rows.index([kind, peer, tag, chunk, dst, dsts, src, srcs, waits])]
        same = [each for each in earlier if each.peer == peer and (each.kind is Kind.SEND) == (op.kind is Kind.SEND)]
        assert tag == len(same)
        for which, first, count in ((op.dst, dst, dsts), (op.src, src, srcs)):
            assert spans[first : first + count] == [(s.buffer, s.slot, s.block, s.count) for s in which]
        assert tuple(flat["after"][waited : waited + waits]) == op.after
        waited += waits
    assert waited == len(flat["after"])


@pytest.mark.parametrize("name", ["ring", "bruck", "hierarchical_log_direct", "hierarchical_ring_ring", "tiny"])
def test_the_checker_sees_a_wait_that_is_missing(name: str) -> None:
    """Every `after` is needed: without it memory is raced for."""
    nodes = node_major(3, 2)
    programs = programs_of(name, "all_reduce", nodes, chunks=2)
    tried = missed = 0
    for index, op in enumerate(programs[3].ops):
        for wait in op.after:
            less = replace(op, after=tuple(other for other in op.after if other != wait))
            ops = (*programs[3].ops[:index], less, *programs[3].ops[index + 1 :])
            tried += 1
            try:
                check([*programs[:3], replace(programs[3], ops=ops), *programs[4:]], nodes, orders=0)
                missed += 1
            except ProgramError as error:
                assert "race" in str(error)
    assert tried and not missed


def test_the_checker_sees_other_mistakes() -> None:
    nodes = node_major(2, 2)
    programs = programs_of("bruck", "all_gather", nodes)
    first = programs[0].ops[0]

    def failure(*ops) -> str:
        with pytest.raises(ProgramError) as caught:
            check([replace(programs[0], ops=ops), *programs[1:]], nodes)
        return str(caught.value)

    assert "one end only" in failure(*programs[0].ops[1:])
    wrong = replace(first, src=(replace(first.src[0], block=2),))
    assert "is sent" in failure(wrong, *programs[0].ops[1:])
    late = replace(first, after=(1,))
    assert "comes later" in failure(late, *programs[0].ops[1:])
    unset = replace(first, src=(replace(first.src[0], buffer=1),))
    assert "not set" in failure(unset, *programs[0].ops[1:]) or "race" in failure(unset, *programs[0].ops[1:])
    assert "wrong" in failure(*(op for op in programs[0].ops if op.kind is not Kind.COPY))


def test_the_checker_sees_a_deadlock() -> None:
    """Two ranks that receive only when the other has taken their message."""
    programs = programs_of("direct", "all_gather", [range(2)])
    stuck = []
    for program in programs:
        send = next(index for index, op in enumerate(program.ops) if op.kind is Kind.SEND)
        ops = [replace(op, after=(send,)) if op.kind is Kind.RECV else op for op in program.ops]
        stuck.append(replace(program, ops=tuple(ops)))
    with pytest.raises(ProgramError, match="deadlock"):
        check(stuck)
