"""torch's own tests of torch.distributed, on the backend "pccl": those that are in its wheel and need no GPU.

``python -m tests.pccl.torch_suite [WORDS...]`` runs those whose names contain one of the words; by default all of them.

torch starts new processes for each test, which takes seconds; here the same ranks run all tests, each in a group of its own.
Its tests for gloo alone, and those of all-to-all that it runs on MPI alone, are run as well.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import re
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from axonn_plugins.cluster.launch import launch
from axonn_plugins.pccl import register
from axonn_plugins.pccl.build import load

RANKS = 4
EXCLUDED = {
    r"cuda|nccl|_gpu|non_default_stream|mixed_backend_err|irecv_op_err": "needs a GPU or NCCL",
    r"profil|execution_trace|logging|_logged|with_logger|without_logger": "looks for gloo's names in profiles and logs",
    r"monitored_barrier_gloo": "looks for gloo's words in errors",
    r"SyncBatchNorm_process_group": "needs torchvision",
    r"barrier_timeout_global": "makes the group of all ranks itself",
}
"""Patterns of tests that are left out, and why."""
_TIMEOUT = 30.0  # seconds, of a test's group


def suite() -> ModuleType:
    """torch's tests, as for gloo."""
    os.environ.update(BACKEND="gloo")
    os.environ.setdefault("WORLD_SIZE", str(RANKS))
    if (
        "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None
    ):  # which torch's test cases build on; none of these need what it adds
        stand_in = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal import common_utils

    skip = common_utils.skip_but_pass_in_sandcastle_if

    def skip_if(condition: bool, reason: str) -> Any:
        return skip(condition and not reason.startswith("Only MPI supports"), reason)

    common_utils.skip_but_pass_in_sandcastle_if = skip_if
    from torch.testing._internal.distributed import distributed_test

    common_utils.skip_but_pass_in_sandcastle_if = skip
    return distributed_test


def names(tests: ModuleType, words: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """The tests to run, and those that are left out with the reason."""
    found = [name for name in dir(tests.DistributedTest._DistTestBase) if name.startswith("test_")]
    found = [name for name in found if not words or any(word in name for word in words)]
    left_out = {
        name: why for name in found for pattern, why in EXCLUDED.items() if re.search(pattern, name, re.IGNORECASE)
    }
    return [name for name in found if name not in left_out], left_out


def outcome(case: unittest.TestCase, name: str) -> str:
    """Run one test; "passed", "skipped: ..." or "failed: ..."."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    try:
        getattr(case, name)()
    except unittest.SkipTest as skipped:
        return f"skipped: {skipped}"
    except SystemExit as ended:  # how torch's tests skip on a rank
        words = [skip.message for skip in TEST_SKIPS.values() if skip.exit_code == ended.code]
        return f"skipped: {words[0]}" if words else f"failed: exit {ended.code}"
    except BaseException:
        return f"failed: {traceback.format_exc()}"
    return "passed"


def run(chosen: list[str]) -> list[tuple[str, float]]:
    """Outcome of each test on this rank, and its seconds."""
    tests = suite()
    from torch.testing._internal.common_utils import TestCase

    register()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["AXONN_PCCL_TUNE"] = "0"

    shared = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, rank == 0)
    meetings = itertools.count()

    def meet() -> None:
        """All ranks, without the backend."""
        label = f"meeting {next(meetings)}"
        if shared.add(label, 1) == size:
            shared.set(f"{label} all", "")
        shared.wait([f"{label} all"], timedelta(seconds=4 * _TIMEOUT))

    class Case(TestCase, tests.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def _barrier(self, *_: Any, **__: Any) -> None:
            meet()

        def runTest(self) -> None: ...

    Case.rank, Case.world_size = rank, str(size)  # type: ignore[attr-defined]
    found = []
    for number, name in enumerate(chosen):
        began = time.monotonic()
        torch.manual_seed(number)
        random.seed(number)
        store = dist.PrefixStore(name, shared)
        dist.init_process_group("pccl", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=_TIMEOUT))
        # Where a test does one thing on gloo and another on NCCL, it knows no third backend.
        tests.BACKEND = "gloo" if "no_sync" in name else "pccl"
        case = Case()
        case.setUp()
        said = outcome(case, name)
        case.doCleanups()
        meet()
        if dist.is_initialized():
            dist.destroy_process_group()
        found.append((said, time.monotonic() - began))
    shared.add("over", 1)
    while rank == 0 and shared.add("over", 0) < size:  # who holds the store stays until nobody needs it
        time.sleep(0.01)
    return found


def main(*words: str) -> int:
    """Run, print what came of it; how many tests failed."""
    load()
    tests = suite()
    chosen, left_out = names(tests, words)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TEMP_DIR"] = folder
        Path(folder, "test_dir").mkdir()
        ranks = launch(run, RANKS, chosen)
    counts: Counter[str] = Counter()
    for name, found in zip(chosen, zip(*ranks, strict=True), strict=True):
        said = [one for one, _ in found]
        worst = next((one for one in said if one.startswith("failed")), None) or next(
            (one for one in said if one.startswith("skipped")), said[0]
        )
        counts[worst.partition(":")[0]] += 1
        seconds = max(took for _, took in found)
        if worst != "passed":
            print(f"{name}: {worst}")
        elif seconds > 2:
            print(f"{name}: {seconds:.1f} s")
    print(dict(counts), "left out:", dict(Counter(left_out.values())))
    return counts["failed"]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
