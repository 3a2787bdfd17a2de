"""Megatron-LM's pretrain script on the tests' device, as it is: its groups are those that it makes for NCCL.

    python -m tests.device FILE --megatron SCRIPT CASES.json

Cases and results are those of `tests.megatron.harness`.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import samo.fused
from axonn_plugins.autoload import activate, on_import
from axonn_plugins.cluster.launch import RankFailed, launch
from axonn_plugins.hosts.megatron import cpu
from tests.device import cuda
from tests.megatron.harness import ROOT, path, read

late: Any = None
_STANDS_IN = {
    "megatron.core.datasets.utils": cpu._use_compiled_helpers,
    "megatron.training.initialize": cpu._no_warmup,
    "megatron.core.transformer.dot_product_attention": cpu._take_widths,
    "megatron.core.transformer.moe.moe_utils": cpu._route_without_engine,
    "megatron.core.transformer.multi_latent_attention": cpu._attend_without_engine,
}
"""What Megatron has from compiled libraries that are not here."""


def run(device: Path, script: Path, cases: dict[str, tuple[int, list[str]]], timeout: float) -> dict[str, dict]:
    """See `tests.megatron.harness.run`."""
    cases = {
        name: (ranks, ["nccl" if flag == "gloo" else flag for flag in flags]) for name, (ranks, flags) in cases.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "cases.json")
        file.write_text(json.dumps(cases))
        command = [sys.executable, "-m", "tests.device", str(device), "--megatron", str(script), str(file)]
        environment = {**os.environ, "PYTHONPATH": path(), "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=timeout)
    found = dict(map(json.loads, done.stdout.splitlines()))
    return {name: found.get(name, {"error": f"exit code {done.returncode}"}) for name in cases}


def main(file: Path, script: str, cases: str) -> int:
    """Train every case, and print what came of it."""
    global late
    late = cuda.install(file)
    samo.fused.kernels = lambda: None
    out = os.dup(1)
    os.dup2(2, 1)  # what imports say is no result
    torch.compile = cpu._uncompiled  # type: ignore[assignment]
    fused: Any = ModuleType("megatron.legacy.fused_kernels")
    fused.load = lambda args: None
    sys.modules[fused.__name__] = fused
    activate()
    for name, change in _STANDS_IN.items():
        on_import(name, change)
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="imported")
    importlib.import_module("torch.utils.tensorboard")
    torch.set_num_threads(1)
    for name, (ranks, flags) in json.loads(Path(cases).read_text()).items():
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            try:
                launch(_rank, ranks, script, [*flags, "--tensorboard-dir", folder], log, timeout=300)
                result: dict[str, Any] = read(folder)
            except (RankFailed, TimeoutError) as error:
                result = {"error": f"{error}\n{log.read_text()[-1500:] if log.exists() else ''}"}
        os.write(out, (json.dumps([name, result]) + "\n").encode())
    return 0


def _rank(script: str, flags: list[str], log: Path) -> None:
    with log.open("a") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ["LOCAL_RANK"] = "0"  # each process has a device of its own
    cuda.register(late)
    sys.argv = [script, *flags]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"exit code {ended.code}") from None
    races = late.races()
    assert not races, races[0]
