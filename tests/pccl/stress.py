"""Random collectives, many under way at once, in several groups, checked exactly: ``python -m tests.pccl.stress 5 1000``."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from plugins.launch import launch
from plugins.pccl import register

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
SIZES = (0, 1, 2, 3, 7, 64, 1000, 4099, 30011)
SUM, MIN, MAX, PRODUCT, AVG = (getattr(dist.ReduceOp, n) for n in ("SUM", "MIN", "MAX", "PRODUCT", "AVG"))
Pending = tuple[dist.Work | None, Callable[[], None]]


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
    """What the ranks' tensors make together; integers wrap as torch's do."""
    stacked = torch.stack(parts)
    if stacked.dtype is torch.bool:
        return stacked.any(0) if op in (SUM, MAX) else stacked.all(0)
    if op in (MIN, MAX):
        return stacked.amin(0) if op == MIN else stacked.amax(0)
    made = parts[0].clone()
    for part in parts[1:]:
        made = made * part if op == PRODUCT else made + part
    return made / len(parts) if op == AVG else made


def one(draw: random.Random, group: dist.ProcessGroup, seed: int) -> Pending:
    """Start a random collective; its work and the check of what it made. All members draw the same."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    kind = draw.choice(
        ("gather", "gather list", "scatter", "scatter list", "reduce", "reduce slice", "broadcast", "barrier")
    )
    dtype, elements = draw.choice(DTYPES), draw.choice(SIZES)
    op = draw.choice((SUM, MIN, MAX, PRODUCT, AVG))
    if op == AVG and not dtype.is_floating_point or dtype is torch.bool and op == PRODUCT:
        op = SUM
    if op == PRODUCT and dtype.itemsize < 4:
        op = MAX  # 3 to the 16th is no half-precision number
    parts = [values(dtype, elements, seed + other) for other in range(size)]
    mine = parts[rank].clone()

    def equal(got: Tensor, wanted: Tensor) -> Callable[[], None]:
        def check() -> None:
            assert torch.equal(got, wanted), (kind, dtype, elements, op, size, seed)

        return check

    if kind == "barrier":
        return dist.barrier(group=group, async_op=True), lambda: None
    if kind == "broadcast":
        root = draw.randrange(size)
        return dist.broadcast(mine, group=group, group_src=root, async_op=True), equal(mine, parts[root])
    if kind == "gather":
        whole = torch.empty(size * elements, dtype=dtype)
        if draw.random() < 0.3:  # in place
            mine = whole[rank * elements : (rank + 1) * elements].copy_(mine)
        return dist.all_gather_into_tensor(whole, mine, group=group, async_op=True), equal(whole, torch.cat(parts))
    if kind == "gather list":
        list_of = [torch.empty_like(part) for part in parts]
        work = dist.all_gather(list_of, mine, group=group, async_op=True)
        return work, lambda: [equal(a, b)() for a, b in zip(list_of, parts, strict=True)]  # type: ignore[return-value]
    if kind.startswith("scatter"):
        wide = [values(dtype, elements * size, seed + 100 + other) for other in range(size)]
        wanted = reduced(wide, op)[rank * elements : (rank + 1) * elements]
        if kind == "scatter":
            source = wide[rank].clone()
            out = source[rank * elements : (rank + 1) * elements] if draw.random() < 0.3 else torch.empty_like(mine)
            return dist.reduce_scatter_tensor(out, source, op, group=group, async_op=True), equal(out, wanted)
        out = torch.empty_like(mine)
        pieces = list(wide[rank].clone().chunk(size)) if elements else [mine.clone() for _ in range(size)]
        return dist.reduce_scatter(out, pieces, op, group=group, async_op=True), equal(out, wanted)
    if kind == "reduce slice":
        sparse = torch.zeros(2 * elements, dtype=dtype)
        view = sparse[::2].copy_(mine)
        return dist.all_reduce(view, op, group=group, async_op=True), equal(view, reduced(parts, op))
    return dist.all_reduce(mine, op, group=group, async_op=True), equal(mine, reduced(parts, op))


def stress(operations: int, seed: int = 1, in_flight: int = 12) -> int:
    """Run on every rank; how many operations this one took part in."""
    rank, size = join()
    draw, order = random.Random(seed), random.Random(seed + rank)
    members = [list(range(size)), *(sorted(draw.sample(range(size), draw.randint(1, size))) for _ in range(3))]
    groups = [dist.new_group(ranks) for ranks in members]
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
    print(launch(stress, int(sys.argv[1]), int(sys.argv[2]), *map(int, sys.argv[3:]), timeout=550))
