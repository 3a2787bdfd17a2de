"""The backend among processes: values, failures, and training with what else uses torch.distributed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from axonn_plugins.cluster.launch import free_port, launch
from axonn_plugins.pccl.backend import using
from axonn_plugins.pccl.build import load
from axonn_plugins.pccl.choice import Choice
from tests.pccl.stress import join, stress


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Before ranks are forked, whose time is limited."""
    load()


@pytest.mark.parametrize("ranks", [2, 5])
def test_random_collectives_in_random_groups(ranks: int) -> None:
    assert max(launch(stress, ranks, 250)) == 250


def _unlike(ranks: list[int]) -> str:
    """Rank 1 brings another size; then a new group works."""
    rank, _ = join(timeout=20)
    try:
        dist.all_reduce(torch.ones(7 if rank == 1 else 5))
        return "no error"
    except RuntimeError as error:
        text = str(error)
    store = dist.TCPStore("127.0.0.1", ranks[0], is_master=rank == 0)
    dist.destroy_process_group()
    dist.init_process_group("pccl", store=store, rank=rank, world_size=len(ranks) - 1)
    again = torch.ones(3)
    dist.all_reduce(again)
    assert again.tolist() == [len(ranks) - 1] * 3
    dist.destroy_process_group()
    return text


def test_calls_that_do_not_match_are_named_on_every_rank() -> None:
    texts = launch(_unlike, 3, [free_port(), 0, 0, 0])
    for text in texts:
        assert "call 1 of its group" in text and "all_reduce of 5 float32 (sum)" in text, text
        assert "all_reduce of 7 float32 (sum)" in text, text


def _halves() -> None:
    rank, _ = join(timeout=20)
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    other = every[torch.randperm(2**16, generator=torch.Generator().manual_seed(1))]
    halves = every.view(torch.float16), other.view(torch.float16)
    for op, wanted in ((dist.ReduceOp.SUM, halves[0] + halves[1]), (dist.ReduceOp.PRODUCT, halves[0] * halves[1])):
        got = halves[rank].clone()
        dist.all_reduce(got, op)
        number = ~wanted.isnan()
        assert got.isnan().logical_xor(number).all()
        assert got[number].view(torch.int16).equal(wanted[number].view(torch.int16))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):  # zeros' signs, the same on both ranks
        for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            zeros = torch.tensor([0.0, -0.0, -0.0, 0.0, -1.0] if rank else [-0.0, 0.0, -0.0, 0.0, 2.0], dtype=dtype)
            with using(Choice("tiny")):
                dist.all_reduce(zeros, op)
            least = op == dist.ReduceOp.MIN
            assert zeros.signbit().tolist() == [least, least, True, False, least], (dtype, op, zeros)


def test_every_half_precision_number_is_added_as_torch_does() -> None:
    launch(_halves, 2)


def _strides() -> None:
    """Rank 1's tensors have gaps, those of the others do not."""
    rank, size = join(timeout=20)

    def spread(data: Tensor) -> Tensor:
        return torch.zeros(2 * data.numel(), dtype=data.dtype)[::2].copy_(data) if rank == 1 else data

    for choice in (Choice("direct"), Choice("ring")):
        with using(choice):
            for asynchronous in (True, False):
                own, whole = spread(torch.arange(4.0) + rank), spread(torch.full((4 * size,), rank + 1.0))
                work = dist.all_reduce(whole, async_op=asynchronous)
                if work is not None:
                    assert work.get_future().wait()[0].unique().tolist() == [size * (size + 1) / 2]
                assert whole.unique().tolist() == [size * (size + 1) / 2]
                work = dist.all_gather_into_tensor(whole, own, async_op=asynchronous)
                assert work is None or work.wait()
                assert whole.tolist() == [float(i + other) for other in range(size) for i in range(4)]
                work = dist.reduce_scatter_tensor(own, whole, async_op=asynchronous)
                assert work is None or work.get_future().wait()[0].numel() == 4
                assert own.tolist() == [size * float(i + rank) for i in range(4)]
    for number in range(50):  # what a call's future has is there when the call was waited for
        work = dist.all_reduce(torch.ones(2), async_op=True)
        assert work is not None
        future = work.get_future() if number % 2 else None
        work.wait()
        assert (future or work.get_future()).value()[0].tolist() == [size] * 2
    # What is copied to where it belongs is nobody's gradient.
    scale = torch.randn(3, 2, dtype=torch.float64).requires_grad_()
    moved, weight = 2 * scale.t(), nn.Parameter(torch.randn(5, 4)[:, ::2])
    with torch.no_grad():
        dist.all_reduce(moved)
    dist.broadcast(weight, 0)
    assert not moved.is_contiguous() and moved.grad_fn is not None and moved.grad_fn.name() == "MulBackward0"
    assert weight.is_leaf
    moved.sum().backward()
    assert scale.grad is not None and scale.grad.unique().tolist() == [2.0]
    dist.destroy_process_group()


def test_ranks_whose_tensors_have_other_strides_choose_alike() -> None:
    launch(_strides, 3)


def _until_killed(rank: int, size: int, port: int, results: Connection, backend: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    join(timeout=30, backend=backend)
    data = torch.ones(300_000)
    dist.all_reduce(data)
    results.send("running")
    try:
        while True:
            dist.all_reduce(data.fill_(1.0))
    except RuntimeError as error:
        results.send((time.time(), str(error)))
    os._exit(0)


def test_a_killed_rank_is_named_by_all_others() -> None:
    size, victim, port = 4, 2, free_port()
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(target=_until_killed, args=(rank, size, port, pipes[rank][1], "pccl")) for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        assert all(pipe.poll(60) and pipe.recv() == "running" for pipe, _ in pipes)
        killed = time.time()
        os.kill(processes[victim].pid or 0, signal.SIGKILL)
        for rank in set(range(size)) - {victim}:
            assert pipes[rank][0].poll(40), f"rank {rank} hangs"
            when, text = pipes[rank][0].recv()
            assert when - killed < 30
            assert "all_reduce of 300000 float32 (sum)" in text and f"rank {victim}" in text, text
    finally:
        for process in processes:
            process.kill()


def _losses(train: Callable[[], list[float]], backend: str) -> list[float]:
    join(backend=backend)
    torch.manual_seed(1)
    losses = train()
    dist.destroy_process_group()
    return losses


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(13, 32), nn.Tanh(), nn.Linear(32, 7), nn.Linear(7, 1)).double()


def _steps(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(3):
        loss = model(torch.randn(6, 13, dtype=torch.float64, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _data_parallel() -> list[float]:
    return _steps(nn.parallel.DistributedDataParallel(_model(), bucket_cap_mb=0.001))


def _fully_sharded() -> list[float]:
    model, mesh = _model(), init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return _steps(fully_shard(model, mesh=mesh))


@pytest.mark.parametrize("train", [_data_parallel, _fully_sharded])
def test_training_is_as_with_gloo(train: Callable[[], list[float]]) -> None:
    ours, theirs = (launch(_losses, 4, train, backend) for backend in ("cpu:pccl", "gloo"))
    assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=1e-12)


def _everything_else() -> Any:
    rank, size = join()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert [item["rank"] for item in objects] == list(range(size))
    received = torch.zeros(3)
    right = dist.isend(torch.full((3,), float(rank)), (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    assert right is not None and right.wait() and received.tolist() == [(rank - 1) % size] * 3
    exchanged = torch.empty(size)
    dist.all_to_all_single(exchanged, torch.arange(size) * 10.0 + rank)
    assert exchanged.tolist() == [rank * 10.0 + other for other in range(size)]
    gathered = [torch.empty(1) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.tensor([float(rank)]), gathered)
    future = dist.all_reduce(torch.ones(2), async_op=True).get_future()  # type: ignore[union-attr]
    assert future.then(lambda done: done.value()[0] * 2).wait().tolist() == [2.0 * size] * 2
    for asynchronous in (False, True):  # a barrier ends behind the collectives that were made before it
        large = torch.ones(2**22)
        before = dist.all_reduce(large, async_op=True)
        barrier = dist.barrier(async_op=asynchronous)
        assert barrier is None or barrier.wait()
        assert before is not None and before.is_completed() and large.unique().tolist() == [size]
    with torch.inference_mode():  # which the backend's own threads are not in
        parts = [torch.empty(2) for _ in range(size)]
        dist.all_gather(parts, torch.full((2,), float(rank)))
    assert torch.stack(parts).tolist() == [[float(other)] * 2 for other in range(size)]
    with pytest.raises(ValueError, match="all_reduce of Bool by AVG is not possible"):
        dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG)
    with pytest.raises(ValueError, match=r"all_gather into 3 Float, expected 3 times 2"):
        dist.all_gather_into_tensor(torch.empty(3), torch.empty(2))
    dist.destroy_process_group()


def test_the_rest_is_there_too() -> None:
    launch(_everything_else, 3)
