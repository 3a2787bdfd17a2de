"""Random collectives, many under way at once, in several groups, checked exactly.

``python -m tests.pccl.stress RANKS OPERATIONS [SEED [IN_FLIGHT [RANKS_PER_NODE]]]``
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_plugins.cluster.launch import launch
from axonn_plugins.pccl import register
from axonn_plugins.pccl.algorithms import algorithms
from axonn_plugins.pccl.backend import forget, planner
from axonn_plugins.pccl.choice import Choice, Measured

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
SIZES = (0, 1, 2, 3, 7, 64, 1000, 4099, 30011)
HUGE = (200_003, 2**20)
SUM, MIN, MAX, PRODUCT, AVG = (getattr(dist.ReduceOp, n) for n in ("SUM", "MIN", "MAX", "PRODUCT", "AVG"))
Pending = tuple[Any, Callable[[], Any]]


def join(timeout: float = 60, backend: str = "pccl") -> tuple[int, int]:
    """Make the process group; this rank and how many there are."""
    from datetime import timedelta

    register()
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    return dist.get_rank(), dist.get_world_size()


def values(dtype: torch.dtype, elements: int, seed: int) -> Tensor:
    """Small whole numbers, whose sums and products over 16 ranks are exact in every type that `reduce` is tried on."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (elements,), generator=generator).bool()
    low = 0 if dtype is torch.uint8 else -3
    return torch.randint(low, 4, (elements,), generator=generator).to(dtype)


def reduced(parts: list[Tensor], op: dist.ReduceOp.RedOpType) -> Tensor:
    """The ranks' tensors reduced; integers wrap as torch's do."""
    stacked = torch.stack(parts)
    if stacked.dtype is torch.bool:
        return stacked.any(0) if op in (SUM, MAX) else stacked.all(0)
    if op in (MIN, MAX):
        return stacked.amin(0) if op == MIN else stacked.amax(0)
    made = parts[0].clone()
    for part in parts[1:]:
        made = made * part if op == PRODUCT else made + part
    return made.div(len(parts), rounding_mode=None if made.is_floating_point() else "trunc") if op == AVG else made


def one(draw: random.Random, group: dist.ProcessGroup, seed: int) -> Pending:
    """Start a random collective; its work and the check of what it made. All members draw the same."""
    kind = draw.choice(OURS if draw.random() < 0.7 else tuple(ELSEWHERE))
    return ELSEWHERE[kind](draw, group, seed) if kind in ELSEWHERE else ours(kind, draw, group, seed)


OURS = (
    *("gather", "gather list", "scatter", "scatter list", "reduce", "broadcast", "barrier"),
    *("reduce coalesced", "gather coalesced", "scatter coalesced"),
)
"""Kinds that have schedules."""


def same(got: Tensor, wanted: Tensor, *details: object) -> Callable[[], None]:
    """The check that they are equal."""

    def check() -> None:
        assert torch.equal(got, wanted), details

    return check


def every(checks: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """All of them."""

    def check() -> None:
        for one_of_them in checks:
            one_of_them()

    return check


def drawn(draw: random.Random) -> tuple[torch.dtype, int, dist.ReduceOp.RedOpType]:
    """A dtype, a number of elements, and an operation that they can be reduced by."""
    dtype = draw.choice(DTYPES)
    elements = draw.choice(SIZES) if draw.random() < 0.98 else draw.choice(HUGE)
    op = draw.choice((SUM, MIN, MAX, PRODUCT, AVG))
    if dtype is torch.bool and op in (AVG, PRODUCT):
        op = SUM
    if op == PRODUCT and dtype.itemsize < 4:
        op = MAX  # 3 to the 16th is no half-precision number
    return dtype, elements, op


def ours(kind: str, draw: random.Random, group: dist.ProcessGroup, seed: int) -> Pending:
    """A collective of a kind in `OURS`."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    dtype, elements, op = drawn(draw)
    elements = min(elements, 2**24 // size**2)  # each rank keeps what all have for all, to check
    parts = [values(dtype, elements, seed + other) for other in range(size)]
    several = range(size) if kind.startswith("scatter") else ()
    wide = [values(dtype, elements * size, seed + 100 + other) for other in several]
    mine, own = parts[rank].clone(), slice(rank * elements, (rank + 1) * elements)
    # Each rank's tensors may have gaps, whatever those of the others have.
    gaps, asynchronous = random.Random(seed * 31 + rank).random() < 0.2, draw.random() < 0.8
    options: dict[str, Any] = {"group": group, "async_op": asynchronous}
    details = (kind, dtype, elements, op, size, seed)

    def spread(data: Tensor) -> Tensor:
        return torch.zeros(2 * data.numel(), dtype=dtype)[::2].copy_(data) if gaps else data

    if kind == "barrier":
        return dist.barrier(**options), lambda: None
    if kind == "broadcast":
        root, mine = draw.randrange(size), spread(mine)
        return dist.broadcast(mine, group_src=root, **options), same(mine, parts[root], *details)
    if kind == "reduce":
        mine = spread(mine)
        return dist.all_reduce(mine, op, **options), same(mine, reduced(parts, op), *details)
    if kind == "gather":
        in_place = draw.random() < 0.3
        whole = (
            torch.empty(size * elements, dtype=dtype) if in_place else spread(torch.empty(size * elements, dtype=dtype))
        )
        mine = whole[own].copy_(mine) if in_place else spread(mine)
        return dist.all_gather_into_tensor(whole, mine, **options), same(whole, torch.cat(parts), *details)
    if kind == "gather list":
        list_of = [spread(torch.empty_like(part)) for part in parts]
        work = dist.all_gather(list_of, mine, **options)
        return work, every([same(a, b, *details) for a, b in zip(list_of, parts, strict=True)])
    if kind == "scatter":
        source, wanted = wide[rank].clone(), reduced(wide, op)[own]
        out = source[own] if draw.random() < 0.3 else spread(torch.empty_like(mine))
        return dist.reduce_scatter_tensor(out, source, op, **options), same(out, wanted, *details)
    if kind == "scatter list":
        out, wanted = spread(torch.empty_like(mine)), reduced(wide, op)[own]
        pieces = [spread(wide[rank][other * elements : (other + 1) * elements]) for other in range(size)]
        return dist.reduce_scatter(out, pieces, op, **options), same(out, wanted, *details)
    checks = []
    with dist._coalescing_manager(group, async_ops=True) as manager:  # type: ignore[attr-defined]
        for number in range(draw.randint(1, 3)):
            some = [values(dtype, elements, seed + 200 + 20 * number + other) for other in range(size)]
            here = some[rank].clone()
            if kind == "reduce coalesced":
                dist.all_reduce(here, op, group=group)
                checks.append(same(here, reduced(some, op), *details))
            elif kind == "gather coalesced":
                whole = torch.empty(size * elements, dtype=dtype)
                dist.all_gather_into_tensor(whole, here, group=group)
                checks.append(same(whole, torch.cat(some), *details))
            else:
                out = torch.empty_like(here)
                dist.reduce_scatter_tensor(out, wide[rank].clone(), op, group=group)
                checks.append(same(out, reduced(wide, op)[own], *details))
    return manager, every(checks)


PLAIN = (torch.float64, torch.float32, torch.int64, torch.int32, torch.uint8)


def exchange(draw: random.Random, group: dist.ProcessGroup, seed: int) -> Pending:
    """An all-to-all of shares of any length."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    dtype, most = draw.choice((*PLAIN, torch.bfloat16, torch.bool)), draw.choice((0, 1, 5, 2000))
    shares = [[draw.randint(0, most) for _ in range(size)] for _ in range(size)]
    sent = [values(dtype, sum(row), seed + other) for other, row in enumerate(shares)]
    parts = [part.split(row) for part, row in zip(sent, shares, strict=True)]
    wanted = torch.cat([parts[other][rank] for other in range(size)])
    got, received = torch.empty_like(wanted), [shares[other][rank] for other in range(size)]
    work = dist.all_to_all_single(got, sent[rank].clone(), received, shares[rank], group=group, async_op=True)
    return work, same(got, wanted, "all_to_all", dtype, size, seed)


def rooted(draw: random.Random, group: dist.ProcessGroup, seed: int) -> Pending:
    """A gather, scatter or reduce."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    kind, dtype, elements = draw.choice(("gather", "scatter", "reduce")), draw.choice(PLAIN), draw.choice(SIZES)
    root = draw.randrange(size)
    parts = [values(dtype, elements, seed + other) for other in range(size)]
    mine, details = parts[rank].clone(), (kind, dtype, elements, size, seed)
    if kind == "reduce":
        work = dist.reduce(mine, group=group, group_dst=root, async_op=True)
        return work, same(mine, reduced(parts, SUM), *details) if rank == root else lambda: None
    if kind == "gather":
        got = [torch.empty_like(part) for part in parts] if rank == root else None
        work = dist.gather(mine, got, group=group, group_dst=root, async_op=True)
        return work, every([same(a, b, *details) for a, b in zip(got or [], parts, strict=False)])
    out = torch.empty_like(mine)
    work = dist.scatter(
        out, [part.clone() for part in parts] if rank == root else None, group=group, group_src=root, async_op=True
    )
    return work, same(out, parts[rank], *details)


def neighbours(draw: random.Random, group: dist.ProcessGroup, seed: int) -> Pending:
    """Each rank sends to the next."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    dtype, elements, tag = draw.choice(PLAIN), draw.choice(SIZES), draw.randrange(5)
    if size == 1:
        return None, lambda: None
    after, before = (rank + 1) % size, (rank - 1) % size
    got, mine = torch.empty(elements, dtype=dtype), values(dtype, elements, seed + rank)
    works = [
        dist.irecv(got, group=group, group_src=before, tag=tag),
        dist.isend(mine, group=group, group_dst=after, tag=tag),
    ]
    check = same(got, values(dtype, elements, seed + before), "send", dtype, elements, size, seed)

    def finished() -> None:
        for work in works:
            assert work is not None
            work.wait()
        check()

    return None, finished


def bits(draw: random.Random, group: dist.ProcessGroup, seed: int) -> Pending:
    """Operations on bits, complex numbers."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    elements = draw.choice(SIZES)
    if draw.random() < 0.5:
        numbers = [values(torch.int32, elements, seed + other) for other in range(size)]
        whole = numbers[0].clone()
        for number in numbers[1:]:
            whole ^= number
        mine = numbers[rank].clone()
        return dist.all_reduce(mine, dist.ReduceOp.BXOR, group=group, async_op=True), same(
            mine, whole, "bits", size, seed
        )
    parts = (
        [torch.complex(*values(torch.float32, 2 * elements, seed + other).chunk(2)) for other in range(size)]
        if elements
        else []
    )
    got = [torch.empty_like(part) for part in parts]
    if not parts:
        return None, lambda: None
    work = dist.all_gather(got, parts[rank].clone(), group=group, async_op=True)
    return work, every([same(a, b, "complex", size, seed) for a, b in zip(got, parts, strict=True)])


def objects(draw: random.Random, group: dist.ProcessGroup, seed: int) -> Pending:
    """Python's objects, one way or the other."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    thing = {"rank": rank, "seed": [seed] * draw.randrange(200)}
    if draw.random() < 0.5:
        got: list[Any] = [None] * size
        dist.all_gather_object(got, thing, group=group)
        assert got == [{**thing, "rank": other} for other in range(size)]
    else:
        root = draw.randrange(size)
        sent = [thing if rank == root else None]
        dist.broadcast_object_list(sent, group=group, group_src=root)
        assert sent == [{**thing, "rank": root}]
    return None, lambda: None


ELSEWHERE: dict[str, Callable[[random.Random, dist.ProcessGroup, int], Pending]] = {
    "exchange": exchange,
    "rooted": rooted,
    "neighbours": neighbours,
    "bits": bits,
    "objects": objects,
}
"""Kinds whose messages go straight to where they belong, and some of many calls."""


def vary(draw: random.Random, group: dist.ProcessGroup) -> None:
    """Have the group go by random measurements: any algorithm for any size."""
    times: dict[str, dict[int, dict[Choice, float]]] = {}
    for collective in ("all_gather", "reduce_scatter", "all_reduce"):
        names = sorted(algorithms(collective, dist.get_world_size(group)))
        table = times[collective] = {}
        for exponent in (3, 7, 10, 14, 17, 21):
            choices = [Choice(draw.choice(names), draw.choice((1, 1, 2, 3))) for _ in range(2)]
            table[2**exponent] = {choice: draw.uniform(1, 3) for choice in choices}
    planner(group).measured = Measured(times)
    forget(group)


def stress(operations: int, seed: int = 1, in_flight: int = 12, ranks_per_node: int = 0) -> int:
    """Run on every rank; how many operations this one took part in.

    Args:
        operations: of all groups.
        seed: all ranks' alike.
        in_flight: how many at a time.
        ranks_per_node: of nodes that are pretended; 0: the real ones.
    """
    if ranks_per_node:
        os.environ["AXONN_PCCL_RANKS_PER_NODE"] = str(ranks_per_node)
    rank, size = join()
    draw, order = random.Random(seed), random.Random(seed + rank)
    members = [list(range(size)), *(sorted(draw.sample(range(size), draw.randint(1, size))) for _ in range(3))]
    groups = [dist.new_group(ranks) for ranks in members]
    for which, group in enumerate(groups):
        if which % 2 and rank in members[which]:
            vary(random.Random(seed + which), group)
    pending: list[Pending] = []
    done = 0
    for number in range(operations):
        which = draw.randrange(len(groups))
        here = random.Random(seed * 1_000_003 + number)
        if rank not in members[which]:
            continue
        pending.append(one(here, groups[which], 1000 * number))
        done += 1
        if len(pending) >= in_flight:
            # Ranks wait in other orders, and for another number of works.
            for _ in range(order.randint(1, in_flight)):
                finish(pending.pop(order.randrange(len(pending))))
    for item in pending:
        finish(item)
    dist.barrier()
    dist.destroy_process_group()
    return done


def finish(item: Pending) -> None:
    """Wait, and check."""
    work, check = item
    if work is not None:
        work.wait()
    check()


if __name__ == "__main__":
    print(launch(stress, int(sys.argv[1]), int(sys.argv[2]), *map(int, sys.argv[3:])))
