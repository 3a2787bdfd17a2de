"""DeepSpeed's own tests of experts under ``"ted": {}``, from a checkout of DeepSpeed that DEEPSPEED_SOURCE names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = os.environ.get("DEEPSPEED_SOURCE")
SKIPPED = {"test_moe_tp.py": 2, "test_moe.py": 0}
"""Tests for which tutel must be installed."""
LEFT_OUT = "TestMoESingleton::test_all_to_all[multi]"
"""Counts calls of stock's own all-to-all, in whose place TED has another."""


@pytest.mark.skipif(SOURCE is None, reason="DEEPSPEED_SOURCE names no checkout of DeepSpeed, of the installed version")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", SKIPPED)
def test_pass_under_ted(file: str) -> None:
    folder = Path(str(SOURCE)) / "tests"
    (found,) = folder.glob(f"unit/**/moe/{file}")
    variables = {
        "AXONN_TESTED_BLOCK": '{"ted": {}}',
        "AXONN_TESTED_SAMPLES": "8",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.deepspeed.deepspeeds_tests",
        "-q",
        str(found.relative_to(folder)),
        "--deselect",
        f"{found.relative_to(folder)}::{LEFT_OUT}",
    ]
    ended = subprocess.run(command, cwd=folder, env=os.environ | variables, capture_output=True, text=True)
    summary = re.sub(r"\x1b\[\d*m", "", ended.stdout).strip().splitlines()[-1]
    assert ended.returncode == 0 and "failed" not in summary, ended.stdout[-8000:]
    skipped = re.search(r"(\d+) skipped", summary)
    assert int(skipped[1] if skipped else 0) == SKIPPED[file], summary
