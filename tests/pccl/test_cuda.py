"""On a GPU, in one process: NCCL takes no two ranks of a group on one device; what needs several: test_device.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from axonn_plugins.cluster.launch import free_port
from axonn_plugins.pccl import register
from axonn_plugins.pccl.backend import using
from axonn_plugins.pccl.build import load
from axonn_plugins.pccl.choice import NATIVE, Choice

here = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def _alone(backend: str) -> None:
    """Streams, futures and values in a world of one."""
    register()
    torch.cuda.set_device(0)
    dist.init_process_group(backend)
    slow = torch.randn(4096, 4096, device="cuda")
    for choice in (Choice(NATIVE), Choice("ring"), Choice("hierarchical_log_direct", 2)):
        with using(choice, device="cuda"):
            data = torch.zeros(1_000_003, device="cuda")
            for _ in range(20):
                slow = (slow @ slow).clamp(-1, 1)
            data += 3.0 + 0 * slow[0, 0]  # late: the collective must wait for the caller's stream
            work = dist.all_reduce(data, dist.ReduceOp.AVG, async_op=True)
            assert work is not None
            work.wait()
            doubled = work.get_future().then(lambda future: 2 * future.value()[0])
            assert torch.equal(doubled.wait(), torch.full_like(data, 6.0))
            out = torch.empty_like(data)
            dist.all_gather_into_tensor(out, data)
            dist.reduce_scatter_tensor(data.zero_(), out)
            assert torch.equal(data, out) and out.unique().tolist() == [3.0]
            if choice.algorithm != NATIVE:
                dist.all_reduce(short := torch.ones(5, dtype=torch.int16, device="cuda"))  # which NCCL knows not
                assert short.tolist() == [1] * 5
    dist.broadcast(out, 0)
    dist.barrier()
    if backend != "cuda:pccl":
        dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()


@here
@pytest.mark.parametrize("backend", ["pccl", "cpu:pccl,cuda:pccl", "cpu:gloo,cuda:pccl", "cuda:pccl"])
def test_one_process(backend: str) -> None:
    load()
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    # Not forked: a process that used CUDA has no use for it in a fork.
    done = subprocess.run(
        [sys.executable, "-m", "tests.pccl.test_cuda", backend],
        cwd=Path(__file__).parents[2],
        env=os.environ | place,
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_device_it_is_refused_in_words() -> None:
    register()
    with pytest.raises(ValueError, match='"cuda:pccl" needs a CUDA device'):
        dist.init_process_group("cuda:pccl", store=dist.HashStore(), rank=0, world_size=1)


if __name__ == "__main__":
    _alone(sys.argv[1])
