"""Processes around the backend: they fork, end without a word, run out of memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import torch.distributed as dist

from axonn_plugins.cluster.launch import free_port, launch
from axonn_plugins.pccl.build import load
from tests.deepspeed.scripts import environment
from tests.pccl.stress import join


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Before ranks are forked, whose time is limited."""
    load()


def _said(function: Any, *arguments: Any) -> str:
    try:
        function(*arguments)
    except RuntimeError as error:
        return str(error)
    return "no error"


def _child(says: Any) -> None:
    """Asks for links that its parent has not."""
    says.send(_said(dist.all_reduce, torch.ones(60_000)))


def _forks() -> list[Any]:
    """All ranks have children while calls are under way, and go on; a child is told that it is not a rank."""
    rank, size = join(timeout=60)
    fork = get_context("fork")
    found: list[Any] = []
    for number, end in enumerate((_child, os._exit)):
        data = [torch.full((50_000,), float(rank)) for _ in range(8)]
        pending = [dist.broadcast(each, 0, async_op=True) for each in data]
        ours, theirs = fork.Pipe(duplex=False)
        child = fork.Process(target=end, args=(theirs,) if number == 0 else (0,))
        child.start()
        for work in pending:
            assert work is not None
            work.wait()
        assert not any(each.any() for each in data)
        if number == 0:
            found.append(ours.recv() if ours.poll(30) else "nothing")
        child.join(20)
        found.append(child.exitcode)
        child.kill()
    after = torch.full((60_000,), float(rank))
    dist.all_reduce(after)
    assert after.eq(sum(range(size))).all()
    dist.destroy_process_group()
    return found


def test_a_forked_child_harms_nobody() -> None:
    for text, *codes in launch(_forks, 4):
        assert "forked" in text and "group of its own" in text, text
        assert codes == [0, 0]


ENDING = """
import os, sys, time
import torch, torch.distributed as dist
from axonn_plugins.pccl import register
from axonn_plugins.pccl.build import load

register()
load()

def run(rank, last):
    dist.init_process_group("pccl")
    dist.all_reduce(torch.ones(100_000))
    # Rank 0 has sent when the others begin to listen, and nobody keeps the tensors.
    time.sleep(0.3 * rank)
    data = torch.full((1000,), float(rank))
    dist.broadcast(data, 0)
    assert data.eq(0).all()
    if last == "together":
        works = [dist.all_gather_into_tensor(torch.empty(30_000), torch.ones(10_000), async_op=True) for _ in range(20)]
        works[-1].wait()

for last, port in zip(("together", "one by one"), sys.argv[1:], strict=True):
    ranks = []
    for rank in range(3):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            os.environ |= {"RANK": str(rank), "MASTER_PORT": port}
            run(rank, last)
            sys.exit()  # as an interpreter ends that nobody forked
    print(last, [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks], flush=True)
"""


def test_ranks_may_end_without_destroying_their_group() -> None:
    began = time.monotonic()
    variables = environment(3, 0, PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, "-c", ENDING, str(free_port()), str(free_port())]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["together [0, 0, 0]", "one by one [0, 0, 0]"], done.stdout + done.stderr
    assert "Error" not in done.stderr, done.stderr
    assert time.monotonic() - began < 60


def _without_memory() -> str:
    """Rank 1's engine finds no memory for partial sums; every rank is told, and nobody dies."""
    rank, size = join(timeout=30)
    whole, own = torch.ones(3 * 16 * 2**20), torch.empty(16 * 2**20)
    dist.all_reduce(torch.ones(10))
    store: Any = dist.distributed_c10d._get_default_store()
    store.set(f"reduced{rank}", "")
    store.wait([f"reduced{other}" for other in range(size)])  # what fails next ends calls that are not done, too
    if rank == 1:
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, resource.RLIM_INFINITY))
    text = _said(dist.reduce_scatter_tensor, own, whole)
    again = _said(dist.all_reduce, torch.ones(1))
    assert again.partition(": ")[2] in text or text.partition(": ")[2] in again, (text, again)
    return text


def test_what_fails_in_the_engine_is_raised_to_the_caller() -> None:
    os.environ["AXONN_PCCL_ALGORITHM"] = "ring"  # whose partial sums need memory of their own
    try:
        texts = launch(_without_memory, 3)
    finally:
        del os.environ["AXONN_PCCL_ALGORITHM"]
    assert all("rank 1: the engine failed: std::bad_alloc" in text for text in texts), texts
