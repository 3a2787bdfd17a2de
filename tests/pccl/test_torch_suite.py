"""torch's own tests of torch.distributed on pccl: all that are in its wheel and need no GPU."""

from __future__ import annotations

import subprocess
import sys


def test_torchs_own_tests_pass() -> None:
    """In a process of its own, as torch's test modules change what they import."""
    run = subprocess.run([sys.executable, "-m", "tests.pccl.torch_suite"], capture_output=True, text=True)
    counts = run.stdout.strip().splitlines()[-1]
    assert run.returncode == 0 and "passed" in counts, run.stdout[-6000:] + run.stderr[-2000:]
