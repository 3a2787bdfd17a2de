"""The systems on a device whose streams are waited for by nobody who does not say so (README.md), in a process of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device.build import compiled
from tests.device.mutations import MUTATIONS

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(
        torch.backends.cuda.is_built(), reason="this torch has CUDA, and the tests' device is for one without"
    ),
    pytest.mark.timeout(900),  # all cases are run, and the device is compiled, for the first of them
]
EVERY_RUN = (
    "tells",
    "computes",
    "communicates",
    "grids",
    "sequences",
    "states",
    "pruned",
    "buckets",
    "experts",
    "pccl",
)
EVERY_RUN += ("stages_3", "stages_4", "composed", "weights_of_losses", "host_waits")
MORE = ("stages_2", "stages_2_replicas_2", "stages_4_replicas_2", "composed_8")


def ran(file: Path, *cases: str) -> dict[str, dict[str, Any]]:
    """Output of the cases, by name."""
    environment = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.device", str(file), *cases],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    assert len(said) == len(cases), done.stderr[-4000:]
    return {each["case"]: each for each in said}


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("late"))


@pytest.fixture(scope="module")
def found(device: Path) -> dict[str, dict[str, Any]]:
    return ran(device, *EVERY_RUN)


@pytest.mark.parametrize("case", EVERY_RUN)
def test_case(found: dict[str, dict[str, Any]], case: str) -> None:
    assert "error" not in found[case], found[case]["error"]


@pytest.mark.thorough
def test_more_ranks(device: Path) -> None:
    for case, said in ran(device, *MORE).items():
        assert "error" not in said, (case, said["error"])


_WAITS = re.compile(
    r"(?<!self)\.wait\(\)|wait_tensor\(|wait_stream\(|record_stream\(|settle\((?!self|found)|[^_]slots?\.leave\(\)|cuda\.synchronize\("
    r"|\bready\.|= wait\(|return wait\("
)
_PLACES = ("axonn_tp/comm", "axonn_tp/context", "axonn_tp/layers", "ted_moe", "samo", "plugins/axonn_plugins/optim")
_PLACES += ("plugins/axonn_plugins/pipeline", "plugins/axonn_plugins/hosts/common/goldfish.py")
_PLACES += ("plugins/axonn_plugins/pccl/device.py", "plugins/axonn_plugins/pccl/csrc/device.cpp")
NOT_ON_A_DEVICE = {
    "self._whole.pop(0).wait()": "only gloo's sums in parts hold the whole",
    "work.wait()": "a backend that knows no groups: not NCCL",
    "capacity = routes.capacity if room is None else room.wait()": "numbers of the host; the wait below it is mutated",
    "return Agreement(int(count), tokens, self.groups, drawn).wait()": "the same",
    "same.wait()": "the same",
    "self.pending.wait()": "threads of a wire that cannot be asked: gloo",
    "pending.wait()": "the same, and the wait of `Incoming.take`, which is mutated",
    "(self.send if forth == (self._own == link) else self.receive)(byte, other, channel).wait()": "whether links connect: test_ordered.py",
    "torch.cuda.current_stream().synchronize()": "MPI, which needs a library that knows CUDA",
}


def test_every_wait_is_mutated() -> None:
    """A wait that is new is taken away in turn, too (`tests.device.mutations`), or is said not to be a device's."""
    mutated = {(each.file, line.strip()) for each in MUTATIONS for line in each.old.splitlines() if line.strip()}
    for place in _PLACES:
        root = ROOT / place
        for file in [root] if root.is_file() else sorted(root.rglob("*.py")):
            name = str(file.relative_to(ROOT))
            for line in map(str.strip, file.read_text().splitlines()):
                if not _WAITS.search(line) or line.startswith(("def ", "from ", "#", "//")) or line in NOT_ON_A_DEVICE:
                    continue
                assert any(name == where and text in line for where, text in mutated), (
                    f"{name} waits, and no mutation takes it away: {line}"
                )
