"""Triton decides at its import whether it interprets, so each way to run it has a process of its own."""

import itertools
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from axonn_plugins.config import ConfigError
from axonn_recipes.bench_kernels.measure import TARGETS, compiled, kernels
from axonn_recipes.bench_kernels.recipe import main as bench
from axonn_recipes.bench_kernels.recipe import table
from samo import fused
from tests.matrix import thorough

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def run_cases(folder, every, **environment):
    environment["TRITON_CACHE_DIR"] = str(folder)
    cases = str(Path(__file__).parent / "kernel_cases.py")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *(["-m", ""] if every else []), cases]
    found = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


@needs_triton
@pytest.mark.parametrize("every", [False, thorough(True)])
def test_in_tritons_interpreter(tmp_path, every):
    run_cases(tmp_path, every, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@needs_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not compile")
@pytest.mark.parametrize("every", [False, thorough(True)])
def test_compiled_for_gpus_that_are_not_here(tmp_path, monkeypatch, every):
    """The bounds that README.md states; in every run each kernel for one of two GPUs, in turn."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pairs = [*itertools.product(kernels(), TARGETS)] if every else zip(kernels(), itertools.cycle(["sm_90", "gfx942"]))
    found = [compiled(kernel, target) for kernel, target in pairs]
    assert len(table(found)) == 1 + len(found) == 1 + 15 * (5 if every else 1)
    for code in found:
        assert not code.spilled and code.occupancy >= 0.5, code
        assert code.moved is None or code.kernel.must <= code.moved <= 1.03 * code.kernel.must, code
        if code.kernel.function == "_adam" and code.target.startswith("sm_"):
            assert code.registers <= 64, code


def test_occupancy():
    assert [TARGETS["sm_90"].occupancy(registers, 4) for registers in (32, 40, 64, 122, 255)] == [
        1,
        0.75,
        0.5,
        0.25,
        0.125,
    ]
    assert [TARGETS["sm_90"].occupancy(registers, 8) for registers in (56, 72)] == [0.5, 0.375]
    assert [TARGETS["gfx942"].occupancy(registers, 4) for registers in (24, 64, 65, 256)] == [1, 1, 0.875, 0.25]


def test_what_cannot_be_compiled_is_said():
    with pytest.raises(ConfigError, match='--targets has "sm_7", which is not known; use some of sm_80, sm_90'):
        bench(["--targets", "sm_90,sm_7"])


@needs_triton
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: the kernels are only interpreted and compiled"
)
def test_on_a_gpu(tmp_path):
    run_cases(tmp_path, True, TRITON_INTERPRET="0")


def test_triton_is_optional(monkeypatch):
    assert not fused.runs(torch.zeros(1)), "a CPU has no use for it"
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    fused.kernels.cache_clear()
    assert fused.kernels() is None and not fused.runs(torch.zeros(1))
    fused.kernels.cache_clear()
