"""The systems on a device whose streams are waited for by nobody who does not say so (README.md), in a process of their own."""

from __future__ import annotations

import ast
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
from tests.device.megatron import run as run_on_device
from tests.device.mutations import MUTATIONS
from tests.megatron import harness as megatron
from tests.megatron.harness import CHECKOUT, difference
from tests.megatron.test_pretrain import MIXED, flags

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(
        torch.backends.cuda.is_built(), reason="this torch has CUDA, and the tests' device is for one without"
    ),
    pytest.mark.timeout(900),  # all cases are run, and the device is compiled, for the first of them
]
EVERY_RUN: tuple[str, ...] = ("tells", "computes", "communicates")
EVERY_RUN += ("states_few", "pruned_few", "buckets", "weights_of_losses", "host_waits")
EVERY_RUN += ("grids_few", "experts", "replicas_few", "stages_4", "pccl", "sequences")
MORE: tuple[str, ...] = ("states", "pruned", "grids", "composed", "replicas")
MORE += (
    "states_more",
    "stages_2",
    "stages_3",
    "experts_more",
    "stages_2_replicas_2",
    "stages_4_replicas_2",
)
MORE += ("asked_by_lightning", "asked_by_transformers", "asked_by_megatron", "asked_by_systems")
"""Hosts are imported for these."""
MORE += (
    "composed_8",
    "lists",
    "deepspeed_few",
    "deepspeed_flat",
    "deepspeed_stages",
    "deepspeed_replicas",
    "deepspeed_pccl",
)
MORE += (
    "deepspeed_pccl_auto",
    "deepspeed_stages_3",
    "deepspeed_stages_3_of_2",
    "deepspeed_flat_8",
    "deepspeed_stages_8",
)


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
def device() -> Path:
    return compiled()


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


SAMO, OFFLOAD = ["--axonn-samo", '{"sparsity": 0.9}'], ["--axonn-offload-optimizer", '{"bucket_size": 4096}']
GOLDFISH, TED = (
    ["--axonn-goldfish-k", "4"],
    ["--axonn-ted", "--recompute-granularity", "full", "--recompute-method", "uniform"],
)
TED += ["--recompute-num-layers", "1"]
SHARED, FEW = "--use-distributed-optimizer", ["--train-iters", "4"]
MEGATRON = {
    "grid": flags((2, 1, 2, 1), "plain", *FEW),
    "grid, ZeRO-1, goldfish": flags((1, 2, 1, 2), "plain", SHARED, *FEW, *GOLDFISH),
    "pruned, in host memory, recomputed": flags((2, 2, 1, 1), "plain", *SAMO, *OFFLOAD, *TED, *FEW),
    "2 stages": flags((2, 1, 1, 1), "plain", *FEW, stages=2),
    "2 stages, pruned, in host memory, ZeRO-1": flags((1, 1, 2, 1), "plain", SHARED, *SAMO, *OFFLOAD, *FEW, stages=2),
    "4 stages, goldfish": flags((1, 1, 1, 1), "plain", "--num-layers", "4", *GOLDFISH, *FEW, stages=4),
    "experts": flags((2, 1, 2, 1), "plain", *MIXED, "--expert-model-parallel-size", "2", *FEW),
    "pccl": flags((2, 1, 2, 1), "plain", "--axonn-pccl", '{"algorithm": "hierarchical", "ranks_per_node": 2}', *FEW),
    "sequences": flags((1, 1, 2, 2), "plain", "--context-parallel-size", "2", *FEW),
}
MEGATRON_8 = {
    "grid of 8": flags((2, 2, 2, 1), "plain", SHARED, *FEW),
    "2 stages of 4": flags((2, 1, 2, 1), "plain", SHARED, *SAMO, *OFFLOAD, *FEW, stages=2),
    "4 stages of 2": flags((2, 1, 1, 1), "plain", "--num-layers", "4", *GOLDFISH, *OFFLOAD, *FEW, stages=4),
    "experts of 8": flags((2, 1, 2, 2), "plain", *MIXED, "--expert-model-parallel-size", "2", *FEW),
}


def trained(device: Path, cases: dict[str, tuple[int, list[str]]]) -> dict[str, str]:
    """What is wrong with runs on the device, by case: losses and norms are those of the same flags on the CPU with gloo."""
    script = Path(CHECKOUT, "pretrain_gpt.py")
    wanted, found = megatron.run(script, cases, 1800), run_on_device(device, script, cases, 1800)
    assert not [each["error"] for each in wanted.values() if "error" in each]
    apart = {name: found[name].get("error") or difference(wanted[name], found[name]) for name in cases}
    return {name: str(value) for name, value in apart.items() if not (isinstance(value, float) and value < 1e-5)}


@pytest.mark.skipif(bool(megatron.missing()), reason=megatron.missing())
def test_megatron(device: Path) -> None:
    assert trained(device, MEGATRON) == {}


@pytest.mark.skipif(bool(megatron.missing()), reason=megatron.missing())
@pytest.mark.thorough
def test_megatron_on_more_ranks(device: Path) -> None:
    assert trained(device, MEGATRON_8) == {}


_WAITS = re.compile(
    r"(?<!self)\.wait\(\)|->wait\(\)|wait_tensor\(|wait_stream\(|record_stream\(|settle\((?!self|found)|[^_]slots?\.leave\(\)|cuda\.synchronize\("
    r"|\bready\.|= wait\(|return wait\("
)
_PLACES = ("axonn_tp/comm", "axonn_tp/context", "axonn_tp/layers", "ted_moe", "samo", "plugins/axonn_plugins/optim")
_PLACES += ("plugins/axonn_plugins/pipeline", "plugins/axonn_plugins/hosts/common/goldfish.py")
_PLACES += ("plugins/axonn_plugins/pccl/csrc/device.cpp", "plugins/axonn_plugins/pccl/csrc/schedule.cpp")
NOT_ON_A_DEVICE = {
    "self._whole.pop(0).wait()": "only gloo's sums in parts hold the whole",
    "capacity = routes.capacity if room is None else room.wait()": "numbers of the host; the wait below it is mutated",
    "largest, self._others_train = asked.wait(), asked.trained": "the same",
    "same.wait()": "the same",
    "Agreement(0, nothing, groups, 0, number).wait()": "asked on the CPU alone",
    "self.pending.wait()": "threads of a wire that cannot be asked: gloo",
    "pending.wait()": "the same, and the wait of `Incoming.take`, which is mutated",
    "(self.send if forth == (self._own == link) else self.receive)(byte, other, channel).wait()": "whether links connect: test_ordered.py",
    "here.wait_stream(self._stream)": "no case uses a weight that is gathered ahead first on another stream than the step's",
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


_ASK = {
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce_scatter_tensor",
}
NOT_ASKED_OF_A_DEVICE = {
    "axonn_tp/checkpoint/randomness.py": "gloo's group of checkpoints",
    "axonn_tp/checkpoint/ranks.py": "the same",
    "axonn_tp/grid/distribute.py": "buffers, once before training; parameters are mutated",
    "plugins/axonn_plugins/hosts/deepspeed/pipeline/ties.py": "weights of a loss_fn, in a checkpoint; those of tied layers are mutated",
    "plugins/axonn_plugins/hosts/deepspeed/pipeline/losses.py": "losses of microbatches that are not reduced, in no case; the others are mutated",
    "plugins/axonn_plugins/pipeline/lead.py": "gloo's group",
    "plugins/axonn_plugins/hosts/lightning/streams.py": "readers' first batches, before training",
    "plugins/axonn_plugins/hosts/megatron/parameters.py": "weights of experts, once before training",
    "plugins/axonn_plugins/hosts/transformers/generation.py": "one answer for all ranks that generate, by assisted decoding",
    "plugins/axonn_plugins/hosts/transformers/unfilled.py": "readers' generators, once an epoch",
    "plugins/axonn_plugins/pccl/device_tuner.py": "calls that are timed, the device is waited for behind each",
    "plugins/axonn_plugins/hosts/megatron/mamba.py": "no case has Megatron's Mamba layers on the device",
    "plugins/axonn_plugins/hosts/megatron/muon.py": "no case has Megatron's Muon on the device",
    "plugins/axonn_plugins/observe/doctor.py": "a command of its own",
    "plugins/axonn_plugins/ted/regression_training.py": "training that is compared, by a command of its own",
    "plugins/axonn_plugins/ted/stock.py": "the same",
    "plugins/axonn_plugins/weights/generate.py": "a command of its own",
    "axonn_tp/comm/same_on_replicas.py": "random states of ranks that were seeded differently, of which no case is",
    "ted_moe/gradients.py": "no case has a script's own norm behind ted_moe.sync_gradients on the device",
}


def test_every_question_is_mutated() -> None:
    """So is a collective that waits within its call, but for those of groups and commands that are named."""
    mutated = {(each.file, "".join(each.old.split())) for each in MUTATIONS}
    for top in ("axonn_tp", "samo", "ted_moe", "plugins/axonn_plugins"):
        for file in sorted((ROOT / top).rglob("*.py")):
            name, text = str(file.relative_to(ROOT)), file.read_text()
            for node in ast.walk(ast.parse(text)) if "dist." in text else ():
                if not isinstance(node, ast.Call) or any(one.arg == "async_op" for one in node.keywords):
                    continue
                called = ast.unparse(node.func).rpartition("dist.")
                if not called[1] or called[2] not in _ASK:
                    continue
                said = "".join(str(ast.get_source_segment(text, node)).split())
                known = any(
                    name == where and (said in old or (old in said and len(old) > 20)) for where, old in mutated
                )
                assert known or name in NOT_ASKED_OF_A_DEVICE, (
                    f"{name} asks, and no mutation takes the wait away: {said}"
                )
