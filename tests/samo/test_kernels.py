"""Triton decides at its import whether it interprets, so each way to run it has a process of its own."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from samo import fused

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def run_cases(folder, **environment):
    environment["TRITON_CACHE_DIR"] = str(folder)
    cases = str(Path(__file__).parent / "kernel_cases.py")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", cases]
    found = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


@needs_triton
def test_in_tritons_interpreter(tmp_path):
    run_cases(tmp_path, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@needs_triton
def test_compiled_for_gpus_that_are_not_here(tmp_path):
    run_cases(tmp_path, TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")


@needs_triton
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: the kernels are only interpreted and compiled"
)
def test_on_a_gpu(tmp_path):
    run_cases(tmp_path, TRITON_INTERPRET="0")


def test_triton_is_optional(monkeypatch):
    assert not fused.runs(torch.zeros(1)), "a CPU has no use for it"
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    fused.kernels.cache_clear()
    assert fused.kernels() is None and not fused.runs(torch.zeros(1))
    fused.kernels.cache_clear()
