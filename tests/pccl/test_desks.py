"""Small collectives of a node's ranks go by memory that all of them see, and are what they would be by messages."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from axonn_plugins.cluster.launch import launch
from axonn_plugins.pccl.backend import planner, using
from axonn_plugins.pccl.build import load
from axonn_plugins.pccl.choice import Choice, at_desks
from tests.pccl.stress import join

SIZES = (1, 5, 1000, 8191, 16384, 32768, 32769, 65536)
"""Elements of all blocks, of 4 bytes; 128 KiB are the most of a rank's part."""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Before ranks are forked, whose time is limited."""
    load()


def _laid(group: Any = None) -> int:
    return int(planner(group).fabric.core.laid())


def _data(rank: int, elements: int, draw: random.Random, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(10**6) + rank)
    return torch.randint(-1000, 1000, (elements,), generator=generator).to(dtype)


def _wrong(draw: random.Random, elements: int, dtype: torch.dtype, group: Any, asynchronous: bool) -> list[str]:
    """Collectives whose values are not what they must be; all ranks draw alike."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    state = draw.getstate()
    parts = []
    for other in range(size):
        draw.setstate(state)
        parts.append(_data(other, elements * size, draw, dtype))
    total, mine = torch.stack(parts).sum(0).to(dtype), parts[rank]
    here = slice(rank * elements, (rank + 1) * elements)
    whole, own, summed = torch.empty_like(total), torch.empty(elements, dtype=dtype), mine.clone()
    most, mean = mine.clone(), mine.double()
    works = [
        dist.all_gather_into_tensor(whole, mine[here].contiguous(), group, async_op=asynchronous),
        dist.reduce_scatter_tensor(own, mine, group=group, async_op=asynchronous),
        dist.all_reduce(summed, group=group, async_op=asynchronous),
        dist.all_reduce(most, dist.ReduceOp.MAX, group, async_op=asynchronous),
        dist.all_reduce(mean, dist.ReduceOp.AVG, group, async_op=asynchronous),
        dist.barrier(group, async_op=asynchronous),
    ]
    for work in works:
        if work is not None:
            work.wait()
    gathered = torch.cat([parts[other][other * elements : (other + 1) * elements] for other in range(size)])
    found = {
        "all_gather": whole.equal(gathered),
        "reduce_scatter": own.equal(total[here]),
        "all_reduce": summed.equal(total),
        "maximum": most.equal(torch.stack(parts).amax(0)),
        "mean": bool((mean - torch.stack(parts).double().mean(0)).abs().max() < 1e-9),
    }
    return [f"{name} of {elements * size} {dtype}, rank {rank}" for name, right in found.items() if not right]


def _all() -> tuple[list[str], dict[str, list[int]]]:
    rank, size = join(timeout=60)
    wrong, laid = [], {}
    draw, own = random.Random(5), random.Random(rank)
    for dtype in (torch.float32, torch.int64):
        for elements in SIZES:
            wrong += _wrong(draw, -(-elements // size), dtype, None, own.random() < 0.5)
    numbers: list[int] = []
    group = dist.group.WORLD
    for name, elements, choice in (
        ("by desks", 100, None),
        ("in two parts", 30_000, None),
        ("too long", 40_000, None),
        ("a schedule that was asked for", 100, Choice("direct")),
    ):
        with using(choice):
            before = _laid()
            dist.all_reduce(torch.ones(elements))
            laid[name] = [_laid() - before]
    # More groups than have desks, one after another and at once.
    for _ in range(3):
        groups = [dist.new_group(list(range(size))) for _ in range(10)]
        for group in groups:
            before = _laid(group)
            wrong += _wrong(draw, 10, torch.int64, group, own.random() < 0.5)
            numbers.append(_laid(group) - before)
        for group in groups:
            dist.destroy_process_group(group)
    at_once = [dist.new_group(list(range(size))) for _ in range(20)]
    for group in at_once:
        wrong += _wrong(draw, 10, torch.int64, group, False)
    laid["groups one after another"] = numbers
    some = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        wrong += _wrong(draw, 50, torch.float32, some, False)
    dist.barrier()
    return wrong, laid


def test_values_are_right_and_small_calls_go_by_desks() -> None:
    for wrong, laid in launch(_all, 3):
        assert not wrong
        assert laid["by desks"] == [1] and laid["in two parts"] == [2]
        assert laid["too long"] == [0] and laid["a schedule that was asked for"] == [0]
        assert min(laid["groups one after another"]) >= 6


def _more_groups_than_are_listed() -> list[list[float]]:
    """Sums in groups that come after more groups than a directory of desks has rows, one of which has gone with its desk."""
    rank, size = join(timeout=10)
    at_once = [dist.new_group(list(range(size))) for _ in range(256)]
    for group in at_once:
        dist.barrier(group)
    dist.destroy_process_group(at_once[0])
    sums = []
    for late in range(size):
        group = dist.new_group(list(range(size)))
        if rank == late:  # the others look for its desk before it can have one
            time.sleep(0.3)
        total = torch.arange(3.0, dtype=torch.float64) * (rank + 1)
        dist.all_reduce(total, group=group)
        sums.append(total.tolist())
    return sums


def test_ranks_agree_who_has_a_desk_where_groups_are_more_than_are_listed() -> None:
    assert launch(_more_groups_than_are_listed, 2) == [2 * [[0.0, 3.0, 6.0]]] * 2


def test_which_collectives_are_done_at_desks() -> None:
    node, two = [range(4)], [range(2), range(2, 4)]
    assert at_desks("all_reduce", 2**17, node) and not at_desks("all_reduce", 2**17 + 1, node)
    assert at_desks("all_gather", 2**19, node) and not at_desks("all_gather", 2**19 + 4, node)
    assert not at_desks("broadcast", 8, node) and not at_desks("all_reduce", 8, two)
    assert not at_desks("all_reduce", 8, [range(17)]) and not at_desks("all_reduce", 8, [range(1)])
