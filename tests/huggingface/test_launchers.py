"""torchrun, deepspeed and accelerate launch: what each tells a rank is what the Trainer runs by, with every "auto" key in a file."""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import axonn_plugins
from axonn_plugins.cluster.launch import free_port, launch
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks

axonn_plugins.activate()
pytest.importorskip("accelerate")
import transformers  # noqa: E402

from tests.huggingface.trainer_runs import Case, Sentences, forget, history, llama, padded  # noqa: E402

CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"torch_adam": True, **dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
    "axonn": {"tensor_parallel": dict.fromkeys(("gx", "gy", "gz", "plan"), "auto")},
}
# A script that says how it was started, by the standard library: what it would import takes longer than the rest.
SAYS = """
import json, os, pathlib, sys
said = {"environment": dict(os.environ), "arguments": sys.argv[1:]}
pathlib.Path(f"{os.environ['RANK']}.json").write_text(json.dumps(said))
"""
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", "{port}"],
    "deepspeed": ["deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "{port}"],
    "accelerate": ["accelerate.commands.launch", "--use_deepspeed", "--deepspeed_config_file", "{config}"]
    + ["--num_processes", "2", "--main_process_port", "{port}"],
}


def told(folder: Path, launcher: str) -> list[dict[str, Any]]:
    """Variables that a launcher gives two ranks."""
    config, script = folder / "ds_config.json", folder / "train.py"
    config.write_text(json.dumps(CONFIG))
    script.write_text(SAYS)
    words = [word.format(port=free_port(), config=config) for word in LAUNCHERS[launcher]]
    given = [] if launcher == "accelerate" else ["--deepspeed", str(config)]
    assert launch(run_module, 1, folder, [*words, str(script), *given]) == [0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def run_module(folder: Path, words: list[str]) -> int:
    """As ``python -m`` does, without an interpreter's start; its exit code."""
    for key in (
        "CUDA_VISIBLE_DEVICES",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        os.environ.pop(key, None)
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.chdir(folder)
    sys.argv = words
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def run(started: list[dict[str, Any]]) -> list[dict[str, float]]:
    """By the Trainer, in the environment and by the arguments that a launcher gives this rank."""
    forget()
    said = started[int(os.environ["RANK"])]
    names = ("ACCELERATE_", "LOCAL_", "CROSS_", "FSDP_", "GROUP_", "ROLE_")
    assert all(os.environ[key] == said["environment"].get(key, "0") for key in ("RANK", "LOCAL_RANK"))
    os.environ |= {key: value for key, value in said["environment"].items() if key.startswith(names)}
    parser = transformers.HfArgumentParser([transformers.TrainingArguments])
    case = Case(model=llama)
    parser.set_defaults(num_train_epochs=1, learning_rate=1e-2, weight_decay=0.1, adam_beta2=0.95, warmup_steps=2)
    parser.set_defaults(max_grad_norm=0.5, logging_steps=1, report_to=["none"], disable_tqdm=True, seed=5)
    parser.set_defaults(save_strategy="no", eval_strategy="epoch", output_dir=tempfile.mkdtemp())
    # Of "auto" sizes the Trainer is told as if both ranks read.
    parser.set_defaults(per_device_train_batch_size=8 // len(started), per_device_eval_batch_size=8 // len(started))
    (options,) = parser.parse_args_into_dataclasses(said["arguments"])
    used = transformers.Trainer(
        case.model(), options, train_dataset=Sentences(30), eval_dataset=Sentences(10, 4), data_collator=padded
    )
    used.train()
    return history(used)


def every(started: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    before, found = dict(os.environ), {}
    for name, ranks in started.items():
        found[name] = attempt(partial(run, ranks))
        os.environ.clear()
        os.environ.update(before)
    return found


def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    started = {}
    for name in LAUNCHERS:
        (tmp_path / name).mkdir()
        started[name] = told(tmp_path / name, name)
    config = tmp_path / "torchrun" / "ds_config.json"
    wanted = run_ranks(run, 1, [{"environment": {}, "arguments": ["--deepspeed", str(config)]}])[0]
    for rank in run_ranks(every, 2, started):
        for name, found in rank.items():
            assert not isinstance(found, str), (name, found)
            assert len(found) == len(wanted)
            for entry, other in zip(found, wanted, strict=True):
                assert entry == pytest.approx(other, rel=1e-5, abs=1e-6), name
