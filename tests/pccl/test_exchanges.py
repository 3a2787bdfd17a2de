"""Calls without a schedule: messages between two ranks, roots, all-to-all, uneven lists; and what does not fit together."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from axonn_plugins.cluster.launch import launch
from axonn_plugins.pccl.backend import using
from axonn_plugins.pccl.build import load
from axonn_plugins.pccl.choice import Choice
from tests.pccl.stress import join, values


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Before ranks are forked, whose time is limited."""
    load()


MOVED = (
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint16, torch.uint32, torch.uint64),
    *(torch.complex64, torch.complex128, torch.bool, torch.bfloat16, torch.int16),
)
"""Types that go where only bytes move."""
_MEMFD_SECRET = 447
"""The system call's number, on all processors."""


def _bytes(dtype: torch.dtype, elements: int, seed: int) -> Tensor:
    if dtype is torch.bool:
        return values(dtype, elements, seed)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _types() -> None:
    rank, size = join(timeout=30)
    for number, dtype in enumerate(MOVED):
        parts = [_bytes(dtype, 6, 10 * number + other) for other in range(size)]
        got = [torch.empty_like(parts[0]) for _ in range(size)]
        dist.all_gather(got, parts[rank])
        assert all(_equal(*pair) for pair in zip(got, parts, strict=True)), dtype
        whole = torch.empty(6 * size, dtype=dtype)
        dist.all_gather_into_tensor(whole, parts[rank])
        assert _equal(whole, torch.cat(parts)), dtype
        sent = parts[rank].clone()
        dist.broadcast(sent, 1)
        assert _equal(sent, parts[1]), dtype
        spread = torch.empty(2 * size, dtype=dtype)
        dist.all_to_all_single(spread, _bytes(dtype, 2 * size, 99 + rank))
        assert _equal(
            spread, torch.cat([_bytes(dtype, 2 * size, 99 + other)[2 * rank : 2 * rank + 2] for other in range(size)])
        )
        got = [torch.empty_like(parts[0]) for _ in range(size)]
        dist.gather(parts[rank], got if rank == 1 else None, dst=1)
        assert rank != 1 or all(_equal(*pair) for pair in zip(got, parts, strict=True)), dtype
        one = torch.empty_like(parts[0])
        dist.scatter(one, parts if rank == 2 else None, src=2)
        assert _equal(one, parts[rank]), dtype
        received = torch.empty_like(one)
        work = dist.isend(parts[rank], (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        assert work is not None and work.wait() and _equal(received, parts[rank - 1]), dtype
    numbers = [torch.tensor([0b1100, 7, rank], dtype=torch.int64) >> (rank == 1) for _ in range(3)]
    alike = [torch.tensor([0b1100, 7, other]) >> (other == 1) for other in range(size)]
    for given, op, wanted in zip(
        numbers,
        (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR),
        (alike[0] & alike[1] & alike[2], alike[0] | alike[1] | alike[2], alike[0] ^ alike[1] ^ alike[2]),
        strict=True,
    ):
        dist.all_reduce(given, op)
        assert given.equal(wanted), op
    weighted = torch.full((4,), rank + 1.0)
    dist.all_reduce(weighted, dist._make_nccl_premul_sum(0.5))
    assert weighted.tolist() == [3.0] * 4
    pairs = torch.full((2, size), complex(rank, 1))
    out = torch.empty(2, dtype=torch.complex64)
    dist.reduce_scatter_tensor(out, pairs.flatten())
    assert out.tolist() == [complex(3, 3)] * 2
    unsigned = torch.tensor([40_000 + rank], dtype=torch.uint16)
    dist.all_reduce(unsigned)
    assert unsigned.item() == (120_003) % 2**16
    _large_halves()
    dist.destroy_process_group()


def _large_halves() -> None:
    """An average of float16 whose sum is none."""
    size, large = dist.get_world_size(), torch.full((6,), 40_000.0, dtype=torch.float16)
    one, share = large.clone(), torch.empty(6 // size, dtype=torch.float16)
    dist.all_reduce(one, dist.ReduceOp.AVG)
    dist.reduce_scatter_tensor(share, large, dist.ReduceOp.AVG)
    assert one.equal(large) and share.equal(large[:2])
    dist.reduce_scatter(share, list(large.split(2)), dist.ReduceOp.AVG)
    dist.reduce(one, 1, dist.ReduceOp.AVG)
    assert share.equal(large[:2]) and one.equal(large)


def test_types_travel_where_only_bytes_move() -> None:
    launch(_types, 3)


def _futures() -> None:
    """Whoever has taken the future of a message, or of a collective, may send another that it waits for."""
    rank, size = join(timeout=20)
    received, started = torch.empty(3), time.monotonic()
    work = dist.irecv(received, (rank - 1) % size)
    assert work is not None
    future = work.get_future()
    sent = dist.isend(torch.full((3,), float(rank)), (rank + 1) % size)
    future.wait()
    assert received.tolist() == [(rank - 1) % size] * 3 and sent is not None and sent.wait()
    if rank == 0:
        summed = dist.all_reduce(torch.ones(3), async_op=True)
        assert summed is not None
        future = summed.get_future()
        for other in range(1, size):
            dist.send(torch.ones(2), other)
        future.wait()
    else:
        dist.recv(torch.empty(2), 0)
        dist.all_reduce(torch.ones(3))
    assert time.monotonic() - started < 10
    dist.destroy_process_group()


def test_messages_wait_for_no_callbacks() -> None:
    launch(_futures, 2)


def _secret(elements: int) -> Tensor:
    """Memory that the kernel reads for no other process, as a GPU's driver maps pinned memory."""
    made = ctypes.CDLL(None, use_errno=True).syscall(_MEMFD_SECRET, 0)
    if made < 0:
        raise OSError(ctypes.get_errno(), "no memfd_secret")
    os.ftruncate(made, 8 * elements)
    memory = mmap.mmap(made, 8 * elements)
    os.close(made)
    return torch.frombuffer(memory, dtype=torch.float64)


def _unreadable() -> bool:
    rank, _ = join(timeout=8)
    elements = 2**17
    drawn = torch.randn(2, elements, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    own, got = _secret(elements), _secret(elements)
    own.copy_(drawn[rank])
    work = dist.isend(own, 1 - rank)
    dist.recv(got, 1 - rank)
    assert work is not None and work.wait()
    dist.all_reduce(own)
    return got.equal(drawn[1 - rank]) and own.allclose(drawn[0] + drawn[1], rtol=0, atol=1e-10)


def test_memory_that_no_other_process_may_read_is_sent() -> None:
    try:
        _secret(1)
    except (OSError, ValueError) as error:
        pytest.skip(f"the kernel gives out no such memory: {error}")
    assert launch(_unreadable, 2) == [True, True]


def _uneven() -> None:
    rank, size = join(timeout=30)
    lengths = [3 + 40_000 * (other == 1) + other for other in range(size)]
    parts = [values(torch.float64, length, 5 + other) for other, length in enumerate(lengths)]
    got = [torch.empty(2 * length, dtype=torch.float64)[::2] for length in lengths]
    dist.all_gather(got, parts[rank])
    assert all(map(torch.equal, got, parts))
    given = [
        [values(torch.float64, length, 50 + 7 * other + n) for n, length in enumerate(lengths)] for other in range(size)
    ]
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        out = torch.empty(lengths[rank], dtype=torch.float64)
        dist.reduce_scatter(out, given[rank], op)
        total = sum(theirs[rank] for theirs in given)
        assert torch.allclose(out, total / (size if op == dist.ReduceOp.AVG else 1), rtol=1e-14)
    out = torch.empty(lengths[rank], dtype=torch.float64)
    dist.scatter(out, given[0] if rank == 0 else None, src=0)
    assert out.equal(given[0][rank])
    got = [torch.empty(length, dtype=torch.float64) for length in lengths]
    work = dist.gather(parts[rank], got if rank == 2 else None, dst=2, async_op=True)
    assert work is not None and work.wait() and (rank != 2 or all(map(torch.equal, got, parts)))
    rows = torch.arange(60.0).view(-1, 5)[:, :3] + 100 * rank
    sizes = [[1, 4, 7], [0, 12, 0], [2, 0, 10]]
    out = torch.empty(sum(row[rank] for row in sizes), 3)
    dist.all_to_all_single(out, rows, [row[rank] for row in sizes], sizes[rank])
    wanted = [(torch.arange(60.0).view(-1, 5)[:, :3] + 100 * other).split(sizes[other])[rank] for other in range(size)]
    assert out.equal(torch.cat(wanted))
    empty = torch.empty(0)
    dist.all_to_all_single(empty, torch.empty(0))
    dist.all_reduce(empty)
    reduced = torch.full((7,), rank + 1.0)
    dist.reduce(reduced, 1)
    assert reduced.tolist() == [6.0 if rank == 1 else rank + 1.0] * 7
    dist.destroy_process_group()


def test_lists_may_have_parts_of_any_length() -> None:
    launch(_uneven, 3)


def _one_memory() -> None:
    """What comes in lies where what is sent does, not only in the place that an in-place call has."""
    rank, size = join(timeout=30)
    for choice, each in ((None, 5), (Choice("direct"), 50_000), (Choice("bruck"), 7)):
        with using(choice):
            lengths = [each + 3 * other for other in range(size)]
            whole = [values(torch.float64, size * each, 11 + other) for other in range(size)]
            parts = [values(torch.float64, sum(lengths), 31 + other) for other in range(size)]
            own = slice(rank * each, (rank + 1) * each)
            exchanged, summed = torch.cat([one[own] for one in whole]), torch.stack(whole).sum(0)[own]

            one = whole[rank].clone()
            dist.all_to_all_single(one, one)
            assert one.equal(exchanged), choice
            rows = list(whole[rank].clone().view(size, each))
            dist.all_to_all(rows, rows)
            assert torch.cat(rows).equal(exchanged), choice
            for first in (0, each // 2, (size - 1) * each):
                one = whole[rank].clone()
                dist.reduce_scatter_tensor(one[first : first + each], one)
                assert one[first : first + each].equal(summed), (choice, first)
                one = torch.zeros(size * each, dtype=torch.float64)
                one[first : first + each] = whole[rank][:each]
                dist.all_gather_into_tensor(one, one[first : first + each])
                assert one.equal(torch.cat([other[:each] for other in whole])), (choice, first)
            one = parts[rank].clone()
            dist.reduce_scatter(one[: lengths[rank]], list(one.split(lengths)))
            assert one[: lengths[rank]].equal(torch.stack(parts).sum(0).split(lengths)[rank]), choice
            one = parts[rank].clone()
            dist.all_gather(list(one.split(lengths)), one[: lengths[rank]])
            assert one.equal(torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])), choice
            rows = list(whole[1].clone().view(size, each))
            one = rows[0] if rank == 1 else torch.empty(each, dtype=torch.float64)
            dist.scatter(one, rows if rank == 1 else None, src=1)
            assert one.equal(whole[1][own]), choice
            rows = list(whole[rank].clone().view(size, each))
            dist.gather(rows[0], rows if rank == 1 else None, dst=1)
            assert rank != 1 or torch.cat(rows).equal(torch.cat([other[:each] for other in whole])), choice
    dist.destroy_process_group()


def test_outputs_may_lie_where_inputs_do() -> None:
    launch(_one_memory, 3)


def _messages() -> None:
    """Tags in another order than they are sent, any source, large ones before they are asked for, many at a time."""
    rank, size = join(timeout=30)
    big = torch.arange(300_000.0)
    if rank == 0:
        works = [dist.isend(torch.full((3,), 10.0 * tag + n), 1, tag=tag) for n in range(2) for tag in (4, 2)]
        works.append(dist.isend(big, 1, tag=9))
        works.append(dist.isend(big[:2].contiguous(), 1, tag=9))
        time.sleep(0.3)
        for work in works:
            assert work is not None
            work.wait()
    elif rank == 1:
        time.sleep(0.2)
        for tag, number in ((2, 0), (2, 1), (4, 0), (4, 1)):
            got = torch.empty(3)
            dist.recv(got, 0, tag=tag)
            assert got.tolist() == [10.0 * tag + number] * 3
        spread, few = torch.zeros(600_000)[::2], torch.empty(2)
        works = [dist.irecv(spread, 0, tag=9), dist.irecv(few, 0, tag=9)]
        assert all(work is not None and work.wait() for work in works)
        assert spread.equal(big) and few.tolist() == [0, 1]
    dist.barrier()
    if rank == 0:
        sources = []
        for _ in range(size - 1):
            got = torch.empty(1, dtype=torch.int64)
            sources.append(dist.recv(got))
            assert got.item() == sources[-1] * 7
        assert sorted(sources) == [1, 2]
    else:
        dist.send(torch.tensor([rank * 7]), 0)
    got, mine = [torch.empty(5) for _ in range(2)], torch.full((5,), float(rank))
    operations = [dist.P2POp(dist.irecv, got[n], (rank + 1 + n) % size, tag=3) for n in range(2)]
    operations += [dist.P2POp(dist.isend, mine, (rank + 1 + n) % size, tag=3) for n in range(2)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert [each[0].item() for each in got] == [(rank + 1) % size, (rank + 2) % size]
    things: list[Any] = [None, None]
    if rank == 1:
        dist.recv_object_list(things, src=0)
        assert things == [{"a": 1}, "b"]
    elif rank == 0:
        dist.send_object_list([{"a": 1}, "b"], dst=1)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [f"for {other}" for other in range(size)] if rank == 0 else None, src=0)
    assert scattered == [f"for {rank}"]
    collected: list[Any] | None = [None] * size if rank == 2 else None
    dist.gather_object(rank * 3, collected, dst=2)
    assert collected in (None, [0, 3, 6])
    left = dist.new_group()
    if rank == 0:
        began = time.monotonic()
        with pytest.raises(
            RuntimeError, match=r"recv of 1 float32 from any rank cannot be done: rank [12] has left the group"
        ):
            dist.recv(torch.empty(1), group=left)
        assert time.monotonic() - began < 20
    else:
        dist.destroy_process_group(left)
    dist.barrier()
    dist.destroy_process_group()


def test_messages_go_to_the_receive_that_asks_for_them() -> None:
    launch(_messages, 3)


def _early() -> None:
    """A message comes before it is asked for, to a rank whose own of the same number, of another length and type, is not taken yet."""
    rank, _ = join(timeout=30)
    if rank == 1:
        work = dist.isend(torch.ones(1), 2)
        time.sleep(0.6)
        got = torch.zeros(256, dtype=torch.int32)
        dist.recv(got, 0)
        assert work is not None and work.wait() and got.tolist() == list(range(256))
    elif rank == 0:
        time.sleep(0.2)
        dist.send(torch.arange(256, dtype=torch.int32), 1)
    else:
        time.sleep(1)
        dist.recv(got := torch.zeros(1), 1)
        assert got.item() == 1
    dist.barrier()
    dist.destroy_process_group()


def test_a_message_that_comes_early_has_the_number_of_its_sender() -> None:
    launch(_early, 3)


def _parts(size: int, elements: int) -> list[Tensor]:
    return [torch.zeros(elements) for _ in range(size)]


def _calls(rank: int, size: int, group: Any) -> dict[str, Callable[[], Any]]:
    """Rank 1 has 5 elements, or rows for each rank, where all others have 4."""
    mine = 5 if rank == 1 else 4
    uneven = [4 + (rank == 1 and other == 2) for other in range(size)]

    def message() -> None:
        if rank == 0:
            dist.recv(torch.zeros(4), group=group, group_src=1)
        elif rank == 1:
            dist.send(torch.zeros(5), group=group, group_dst=0)
        else:
            dist.recv(torch.zeros(4), group=group, group_src=0)

    lists = _parts(size, 4)
    return {
        "gather": lambda: dist.gather(torch.zeros(mine), lists if rank == 0 else None, group=group, group_dst=0),
        "scatter": lambda: dist.scatter(torch.zeros(mine), lists if rank == 0 else None, group=group, group_src=0),
        "reduce": lambda: dist.reduce(torch.zeros(mine), group=group, group_dst=0),
        "all_to_all": lambda: dist.all_to_all_single(torch.zeros(mine * size), torch.zeros(mine * size), group=group),
        "all_to_all uneven": lambda: dist.all_to_all_single(
            torch.zeros(4 * size), torch.zeros(sum(uneven)), [4] * size, uneven, group=group
        ),
        "all_to_all list": lambda: dist.all_to_all(_parts(size, 4), [torch.zeros(n) for n in uneven], group=group),
        "all_gather": lambda: dist.all_gather(_parts(size, mine), torch.zeros(mine), group=group),
        "all_gather uneven": lambda: dist.all_gather(
            [torch.zeros(4 + other + (rank == other == 1)) for other in range(size)],
            torch.zeros(4 + rank + (rank == 1)),
            group=group,
        ),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.zeros(mine), _parts(size, mine), group=group),
        "all_reduce": lambda: dist.all_reduce(torch.zeros(mine), group=group),
        "message": message,
        "types": lambda: dist.gather(
            torch.zeros(4, dtype=torch.float64 if rank == 1 else torch.float32),
            lists if rank == 0 else None,
            group=group,
            group_dst=0,
        ),
        "argument": lambda: dist.all_gather_into_tensor(torch.zeros(size * 4), torch.zeros(mine), group=group),
        "weighted": lambda: dist.all_reduce(
            torch.zeros(4), dist._make_nccl_premul_sum(0.5) if rank == 1 else dist.ReduceOp.SUM, group=group
        ),
        "root": lambda: dist.gather(torch.zeros(4), lists if rank < 2 else None, group=group, group_dst=int(rank == 1)),
    }


def _unlike() -> dict[str, tuple[str, float]]:
    rank, size = join(timeout=30)
    found = {}
    for name in _calls(rank, size, None):
        group = dist.new_group()
        began = time.monotonic()
        try:
            _calls(rank, size, group)[name]()
            found[name] = ("no error", 0.0)
        except (RuntimeError, ValueError) as error:
            found[name] = (str(error), time.monotonic() - began)
        dist.barrier()
    return found


def test_sizes_that_differ_are_named_on_every_rank() -> None:
    for rank, found in enumerate(launch(_unlike, 3)):
        for name, (text, seconds) in found.items():
            assert text.startswith("pccl: ") and seconds < 15, (rank, name, seconds, text)
            sizes = {
                "types": ("4 float32", "4 float64"),
                "weighted": ("float32 (sum)", "float32 (weighted sum)"),
                "root": ("to rank 0 of the group", "to rank 1 of the group"),
                "argument": ("12 ", "3 times 5 "),
                "all_gather uneven": ("5 float32", "6 float32"),
            }.get(name, ("4", "5"))
            if name in ("all_to_all", "all_gather", "reduce_scatter"):
                sizes = ("12 float32", "15 float32") if name != "all_to_all" else ("4 float32", "5 float32")
            assert all(size in text for size in sizes), (rank, name, text)


def _missing() -> str:
    rank, _ = join(timeout=60)
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    dist.monitored_barrier()
    dist.barrier()
    if rank == 2:
        time.sleep(4)
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=2))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_monitored_barrier_names_who_is_missing() -> None:
    for text in launch(_missing, 3):
        assert "rank 0: barrier, call 4 of its group, was not done within the timeout of 2 s" in text, text
        assert "it waits for rank 2" in text and "rank 1" not in text, text
