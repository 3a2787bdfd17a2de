"""The switch that lets Megatron run on a CPU: what it answers, and where it stays out of the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.matrix import thorough

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

ROOT = Path(__file__).resolve().parents[2]
ON = """
sys.modules["triton"] = None
import torch
from axonn_plugins.autoload import activate
activate()
from axonn_plugins.hosts.megatron import cpu
assert cpu.enable() and cpu.enable()
import triton, triton.language as tl
assert triton.jit and tl.constexpr
import megatron.core.tensor_parallel.random as random
assert torch.cuda.is_available() and torch.cuda.device_count() == 1
x = torch.ones(2, device="cuda")
assert x.device.type == "cpu" and x.to("cuda:0").cuda() is not None and x.type() == "torch.cuda.FloatTensor"
assert torch.empty(1, device=torch.cuda.current_device()).device.type == "cpu"
assert torch.compile(len) is len and torch.compile(dynamic=True)(len) is len
with torch.cuda.stream(torch.cuda.Stream()):
    torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
torch.cuda.synchronize()
tracker = random.get_cuda_rng_tracker()
tracker.add("model-parallel-rng", 7)
before = torch.get_rng_state()
with tracker.fork():
    first = torch.rand(3)
assert torch.equal(before, torch.get_rng_state())
with tracker.fork():
    assert not torch.equal(first, torch.rand(3))
print("on")
"""
OFF = """
import torch
from axonn_plugins.autoload import activate
activate()
import megatron.core
assert not torch.cuda.is_available() and torch.ones(1).type() == "torch.FloatTensor"
assert "axonn_plugins.hosts.megatron.cpu" not in sys.modules
"""
WITH_GPU = """
import warnings
from unittest.mock import patch
from axonn_plugins.hosts.megatron import cpu
current = torch.cuda.current_stream
with patch("torch.cuda.is_available", lambda: True), warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert cpu.enable() is False and cpu.enable_core() is False
assert torch.cuda.current_stream is current and len(caught) == 2
assert "AXONN_MEGATRON_CPU has no effect on a machine with a GPU; unset it" in str(caught[0].message)
"""
LATE = """
import megatron.core.tensor_parallel.random as random
assert cpu.enable_core() and not torch.cuda.is_available()
tracker = random.get_cuda_rng_tracker()
tracker.add("a", 7)
with tracker.fork("a"):
    first = torch.rand(3)
tracker.reset()
tracker.add("a", 7)
with tracker.fork("a"):
    assert torch.equal(first, torch.rand(3))
print("off, then late")
"""


@pytest.mark.parametrize(
    ("program", "switch", "said"),
    [
        (ON, "1", "on"),
        thorough(OFF + WITH_GPU + LATE, "", "off, then late"),
    ],
    ids=["on, without triton", "off, then with a gpu, then after megatron"],
)
def test_switch(program: str, switch: str, said: str) -> None:
    environment = {**os.environ, "AXONN_MEGATRON_CPU": switch, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import sys\n" + program],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_what_is_sent_is_a_copy() -> None:
    """Gloo reads it later, when the interleaved schedule has emptied it."""
    import torch

    from axonn_plugins.hosts.megatron import cpu

    communication = ModuleType("p2p_communication")
    communication._p2p_ops = lambda **given: given  # type: ignore[attr-defined]
    cpu._send_copies(communication)
    output, buffer = torch.ones(3), torch.zeros(3)
    begun = communication._p2p_ops(tensor_send_prev=None, tensor_send_next=output, tensor_recv_prev=buffer)
    output.data = torch.empty(1)
    assert begun["tensor_send_next"].tolist() == [1, 1, 1] and begun["tensor_send_prev"] is None
    assert begun["tensor_recv_prev"] is buffer
