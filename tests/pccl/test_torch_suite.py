"""torch's own tests of torch.distributed on pccl: all that are in its wheel and need no GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.matrix import thorough

SOME = (
    *("all_gather_group", "all_reduce_sum", "all_to_all_single", "barrier_group", "broadcast_group", "scatter_group"),
    *("reduce_group", "send_recv", "coalescing", "parity_allreduce", "DataParallelCPU"),
)
"""Words in the names of those in every run: each collective, and some of DistributedDataParallel."""


@pytest.mark.parametrize("words", [SOME, thorough(())], ids=["some", "all"])
def test_torchs_own_tests_pass(words: tuple[str, ...]) -> None:
    """In a process of its own, as torch's test modules change what they import."""
    run = subprocess.run([sys.executable, "-m", "tests.pccl.torch_suite", *words], capture_output=True, text=True)
    counts = run.stdout.strip().splitlines()[-1]
    assert run.returncode == 0 and "passed" in counts, run.stdout[-6000:] + run.stderr[-2000:]
