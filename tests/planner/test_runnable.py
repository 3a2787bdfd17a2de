"""The end of an answer: configurations that our parser takes for any question, and a DeepSpeed run, Megatron runs and a torchrun as printed."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from torch import nn
from torch.distributed.run import parse_args

import axonn_plugins
from axonn_plugins import config
from axonn_plugins.config import compose
from axonn_plugins.hosts.deepspeed import states_config
from axonn_plugins.hosts.deepspeed.tensor.config import check
from axonn_plugins.planner import machine, model
from axonn_plugins.planner.answer import Question, answer
from axonn_plugins.planner.model import Transformer
from axonn_plugins.planner.runnable import runnable
from axonn_plugins.planner.setting import Setting
from axonn_plugins.planner.split import split_of
from axonn_recipes.models.gpt import GPT, GPTConfig
from axonn_recipes.models.moe_gpt import MoEGPT
from axonn_tp import Grid
from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.megatron.harness import CHECKOUT, missing, path, run

TINY = "layers=2,hidden=256,heads=8,vocabulary=64,sequence=8"
LLAMA = Transformer(
    "llama",
    layers=3,
    hidden=256,
    heads=8,
    kv_heads=2,
    sequence=8,
    gated=True,
    untied=True,
    feed_forward=512,
    vocabulary=64,
)
MODELS = (
    "gpt3-xl",
    "llama3-8b",
    "mixtral-8x7b",
    "layers=6,hidden=768,heads=12,kv_heads=4,vocabulary=1000,sequence=1000",
)
MACHINES = ("perlmutter", "h100", "summit", "cpu", "b200-nvs64")
SETTINGS = (Setting(), Setting(recompute=True), Setting(sparsity=0.9), Setting(recompute=True, keep_gathered=True))


def started(trained, gpus, batch, strategy, fixed, collectives="native", **setting):
    trained = model.load(trained) if isinstance(trained, str) else trained
    on = replace(machine.load("cpu"), collectives=collectives)
    asked = Question(on, trained, gpus, batch, (strategy,), fixed=fixed, setting=Setting(**setting))
    return runnable(asked, answer(asked, 1).best[0])


def test_any_answer_is_a_configuration_that_is_taken(monkeypatch):
    for half in ("fp16", "bf16"):  # of the machines asked for, not of this one
        monkeypatch.setattr(get_accelerator(), f"is_{half}_supported", lambda: True)
    taken = 0
    for (name, where), strategy, (gpus, batch) in itertools.product(
        itertools.product(MODELS, MACHINES), ("axonn", "1d"), ((8, 48), (24, 24), (64, 640))
    ):
        setting = SETTINGS[taken % len(SETTINGS)]
        on = replace(machine.load(where), collectives="pccl" if taken % 3 else "native", memory=1e15)
        asked = Question(on, model.load(name), gpus, batch, (strategy,), setting=setting)
        for plan in answer(asked, 12).best[::4]:
            taken += 1
            made, split = runnable(asked, plan), split_of(plan, batch)
            assert split is not None and made.ds_config is not None
            raw = json.loads(json.dumps(made.ds_config))
            block = config.parse(raw["axonn"])
            compose.check(block)
            check(raw, Grid(split.gx, split.gy, split.gz, split.gdata))
            states_config.check(block, raw, None)
            assert split.gx * split.gy * split.gz * split.gdata * split.stages == gpus
            readers = split.gz * split.gdata
            assert raw["train_micro_batch_size_per_gpu"] * raw["gradient_accumulation_steps"] * readers == batch
            assert raw["fp16" if where == "summit" else "bf16"] == {"enabled": True} and ("bf16" in raw) != (
                "fp16" in raw
            )
            assert made.megatron is None or ("--fp16" in made.megatron) == (where == "summit")
            assert (block.pipeline is None) == (split.stages == 1) and (block.samo is None) == (setting.sparsity == 0)
            words = shlex.split(made.launch)
            torchrun = parse_args([*words[words.index("torchrun") + 1 :], "train.py"])
            assert int(torchrun.nnodes) * int(torchrun.nproc_per_node) == gpus
            assert int(torchrun.nproc_per_node) <= on.domain
    assert taken > 200


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "deepseek-v2-lite"])
def test_what_shares_samples_is_a_configuration_that_is_taken(name):
    """Also beside stages and experts."""
    shared, beside = 0, 0
    on = replace(machine.load("h100"), memory=1e15)
    for gpus, batch, setting in ((16, 2, Setting()), (64, 4, Setting(sparsity=0.5, offload=True))):
        for strategy in ("axonn", "1d"):
            asked = Question(on, model.load(name, sequence=65536), gpus, batch, (strategy,), setting=setting)
            for plan in answer(asked, 40).best:
                split = split_of(plan, batch)
                raw = json.loads(json.dumps(runnable(asked, plan).ds_config))
                block = config.parse(raw["axonn"])
                compose.check(block)
                check(raw, Grid(split.gx, split.gy, split.gz, split.gdata, split.sequence))
                shared += split.sequence > 1
                beside += split.sequence > 1 and (block.pipeline is not None or block.ted is not None)
    assert shared and beside


def test_what_nobody_runs_is_said():
    asked = Question(machine.load("a100"), model.load("gpt3-xl"), 16, 16, ("summa",))
    made = runnable(asked, answer(asked, 1).best[0])
    assert made.ds_config is None and made.megatron is None and "nothing here runs summa" in made.notes[0]
    asked = Question(machine.load("a100"), model.load("unet-1b"), 16, 16, ("axonn",))
    made = runnable(asked, answer(asked, 1).best[0])
    assert made.ds_config is not None and made.megatron is None
    assert any("pretrain_gpt.py trains texts" in note for note in made.notes)
    asked = Question(
        machine.load("a100"), model.load("gpt3-xl"), 16, 64, ("1d",), fixed={"np": 4}, setting=Setting(interleave=2)
    )
    made = runnable(asked, answer(asked, 1).best[0])
    assert made.ds_config is None and made.megatron is not None
    assert "--num-virtual-stages-per-pipeline-rank 2" in made.megatron


DEEPSPEED = {
    "grid": ("axonn", {"gx": 2, "gz": 2, "m": 2}, {}),
    "data": ("axonn", {"gy": 2, "gdata": 2}, {}),
    "sequences": ("axonn", {"gx": 2, "gz": 2, "sequence": 2}, {}),
    "samo": ("axonn", {"gx": 2, "gdata": 2}, {"sparsity": 0.5}),
    "samo of sequences, offloaded": ("axonn", {"gz": 4, "sequence": 2}, {"sparsity": 0.5, "offload": True}),
    "pccl, recomputed": ("axonn", {"gz": 2, "gdata": 2}, {"recompute": True, "keep_gathered": True}),
    "experts": ("axonn", {"gx": 2, "gdata": 2}, {}),
    "sequences with experts": ("axonn", {"gz": 2, "gdata": 2, "sequence": 2}, {}),
    "sequences in stages": ("axonn", {"gz": 2, "stages": 2, "sequence": 2, "m": 2}, {}),
    "1d": ("1d", {"n1": 4, "bm": 4}, {}),
    "stages of 1d": ("1d", {"n1": 2, "np": 2, "bm": 2}, {"recompute": True}),
    "stages": ("axonn", {"gz": 2, "stages": 2, "m": 2}, {}),
    "offloaded stages": ("axonn", {"gdata": 2, "stages": 2, "m": 2}, {"offload": True}),
}
SOME = ["samo of sequences, offloaded", "pccl, recomputed", "sequences with experts", "stages of 1d"]
"""Every key in one of them."""
MIXTURE = f"{TINY},experts=4,experts_per_token=2,expert_feed_forward=1024,sparse_every=2"


class _Ids(nn.Module):
    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.tokens = gpt.tokens

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(ids)


class _Head(nn.Module):
    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.norm, self.head = gpt.norm, gpt.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


def _steps(names):
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # a kernel for inference alone, compiled for a minute
    )
    axonn_plugins.activate()
    found = {}
    for name in names:
        strategy, fixed, setting = DEEPSPEED[name]
        collectives = "pccl" if name.startswith("pccl") else "native"
        made = started(MIXTURE if "experts" in name else TINY, 4, 8, strategy, fixed, collectives, **setting)
        raw = made.ds_config
        assert raw is not None and name.startswith("pccl") == ("pccl" in raw["axonn"])
        torch.manual_seed(1)
        sizes = GPTConfig(vocabulary=64, context=8, layers=2, heads=8, hidden=256)
        gpt = GPT(sizes)
        if "experts" in name:
            assert any("num_experts=4, ep_size=2, k=2" in note for note in made.notes)
            gpt = MoEGPT(sizes, lambda hidden, expert: MoE(hidden, expert, num_experts=4, ep_size=2, k=2))
        staged = "pipeline" in raw["axonn"]
        net = gpt if not staged else PipelineModule([_Ids(gpt), *gpt.blocks, _Head(gpt)], num_stages=2, loss_fn=gpt.mean_loss)  # fmt: skip
        engine = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=raw)[0]
        micro, steps = raw["train_micro_batch_size_per_gpu"], raw["gradient_accumulation_steps"]
        ids = [torch.randint(64, (micro, 9)) for _ in range(steps)]
        pairs = [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in ids]
        if staged:
            loss = engine.train_batch(iter(pairs))
        else:
            for pair in pairs:
                loss = engine(*pair)
                engine.backward(loss)
                engine.step()
        found[name] = (engine.global_steps, engine.train_batch_size(), bool(torch.isfinite(loss)))
        engine.destroy()
    return found


@pytest.mark.parametrize("names", [SOME, thorough([*DEEPSPEED])], ids=["some", "all"])
def test_deepspeed_starts_as_printed(names):
    for found in run_ranks(_steps, 4, names):
        assert found == dict.fromkeys(names, (1, 8, True))


MEGATRON = {
    "grid": (2, TINY, 2, "axonn", {"gx": 2}, {"recompute": True}),
    "1d": (2, LLAMA, 4, "1d", {"np": 2}, {}),
    "samo": (2, TINY, 2, "axonn", {"gz": 2}, {"sparsity": 0.5}),
    "experts": (4, MIXTURE, 4, "axonn", {"gx": 2, "gdata": 2}, {}),
    "sequences with experts": (4, MIXTURE, 2, "axonn", {"gz": 2, "gdata": 2, "sequence": 2}, {}),
    "sequences in stages": (4, TINY, 2, "axonn", {"gz": 2, "stages": 2, "sequence": 2, "m": 2}, {}),
}


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_megatron_starts_as_printed():
    cases = {}
    for name, (gpus, sizes, batch, strategy, fixed, setting) in MEGATRON.items():
        flags = started(sizes, gpus, batch, strategy, fixed, **setting).megatron
        assert flags is not None
        cases[name] = (gpus, [*shlex.split(flags), "--train-iters", "2"])
    for name, result in run(Path(CHECKOUT, "pretrain_gpt.py"), cases).items():
        assert "error" not in result and len(result["losses"]) == 2, f"{name}: {result}"


PARSED = {
    "llama3-70b": ("axonn", 64, {"gx": 4, "gz": 4, "stages": 4}, {"recompute": True}),
    "llama3-405b": ("1d", 128, {"n1": 8, "np": 16}, {}),
    "deepseek-v2-lite": ("1d", 64, {"np": 1}, {}),
    "qwen3-30b-a3b": ("1d", 64, {"n1": 2, "np": 4}, {"interleave": 2}),
    "gpt3-xl": ("1d", 16, {"n1": 2, "nd": 8}, {"experts": 16}),
    "mistral-7b": ("2d", 16, {"n1": 2, "n2": 4, "nd": 2}, {}),
    "deepseek-v3": ("axonn", 256, {"gx": 2, "gz": 4, "gdata": 8, "stages": 4, "sequence": 2}, {"recompute": True}),
}
_PARSE = """
import json, os, sys
import axonn_plugins
axonn_plugins.activate()
from megatron.training.arguments import parse_args, validate_args
for name, gpus, words in json.loads(sys.stdin.read()):
    os.environ.update(WORLD_SIZE=str(gpus), RANK="0")
    sys.argv = ["pretrain_gpt.py", *words]
    args = validate_args(parse_args(), {})
    sizes = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.data_parallel_size
    print("PARSED", json.dumps([name, sizes, args.num_experts, args.moe_layer_freq, args.expert_model_parallel_size, args.context_parallel_size]))
"""


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_megatron_parses_what_is_for_gpus():
    lines = []
    for name, (strategy, gpus, fixed, setting) in PARSED.items():
        on = replace(machine.load("h100"), memory=1e13)
        asked = Question(on, model.load(name), gpus, 128, (strategy,), fixed=fixed, setting=Setting(**setting))
        flags = runnable(asked, answer(asked, 1).best[0]).megatron
        assert flags is not None
        lines.append((name, gpus, [*shlex.split(flags), "--transformer-impl", "local"]))
    variables = {
        **os.environ,
        "PYTHONPATH": path(CHECKOUT),
        "AXONN_MEGATRON_CPU": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", _PARSE], input=json.dumps(lines), text=True, capture_output=True, env=variables
    )
    said = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("PARSED")]
    found = {name: rest for name, *rest in said}
    assert found.keys() == PARSED.keys(), done.stderr[-2000:]
    assert found["llama3-70b"][0] == [4, 4, 4] and found["llama3-405b"][0] == [8, 16, 1]
    assert found["deepseek-v2-lite"][2] == [0, *[1] * 26] and found["deepseek-v2-lite"][1] == 64
    assert found["qwen3-30b-a3b"][1:3] == [128, [1] * 48] and found["qwen3-30b-a3b"][3] == 8
    assert found["gpt3-xl"][1:] == [16, [0, 1] * 12, 8, 1]
    assert found["mistral-7b"][0] == [2, 1, 2] and found["mistral-7b"][4] == 4
    assert found["deepseek-v3"][3:] == [8, 2]


def test_torchrun_starts_as_printed(tmp_path):
    (tmp_path / "train.py").write_text("import os, sys; open(os.environ['RANK'], 'w').write(' '.join(sys.argv[1:]))")
    made = started(TINY, 2, 8, "axonn", {})
    line = next(line for line in made.text.splitlines() if "train.py" in line)
    folder = str(Path(sys.executable).parent)
    done = subprocess.run(line, shell=True, cwd=tmp_path, env={"PATH": f"{folder}:/usr/bin:/bin"}, timeout=120)
    assert done.returncode == 0 and shutil.which("torchrun", path=folder)
    assert {(tmp_path / str(rank)).read_text() for rank in range(2)} == {
        "--deepspeed --deepspeed_config ds_config.json"
    }
