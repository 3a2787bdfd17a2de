"""LitGPT's finetuning scripts with AXONN_STRATEGY, beside LitGPT as it is in one process."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from tests.distributed import run_ranks

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("lit_model.pth", {}),
    "lora": ("lit_model.pth.lora", {"lora_dropout": 0.0, "lora_mlp": True}),
    "adapter": ("lit_model.pth.adapter", {}),
    "adapter_v2": ("lit_model.pth.adapter_v2", {}),
}


def checkpoint(folder: Path) -> None:
    """A small model with random weights, a tokenizer of bytes, and data."""
    from litgpt.model import GPT, Config
    from tokenizers import Tokenizer, models

    folder.mkdir()
    sizes = {
        "n_layer": 3,
        "n_head": 4,
        "n_query_groups": 2,
        "n_embd": 16,
        "intermediate_size": 24,
        "rotary_percentage": 1.0,
    }
    config = Config(
        "small", block_size=64, padded_vocab_size=132, mlp_class_name="LLaMAMLP", norm_class_name="RMSNorm", **sizes
    )
    config.adapter_start_layer = 1
    torch.manual_seed(0)
    torch.save(GPT(config).state_dict(), folder / "lit_model.pth")
    (folder / "model_config.yaml").write_text(yaml.dump(dataclasses.asdict(config)))
    vocabulary = {"<s>": 0, "</s>": 1, **{chr(code): code for code in range(2, 128)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    samples = [{"instruction": chr(97 + number) * 5, "output": chr(65 + number) * 9} for number in range(20)]
    (folder / "data.json").write_text(json.dumps(samples))


def finetune(folder: Path, strategy: str | None) -> dict[str, Any]:
    """Losses and trained weights of each script."""
    if strategy is not None:
        os.environ["AXONN_STRATEGY"] = strategy
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.data import JSON
    from litgpt.prompts import Default

    found: dict[str, Any] = {}
    readers = 1 if strategy is None else json.loads(strategy).get("gz", 1)
    for method, (file, arguments) in METHODS.items():
        script = importlib.import_module(f"litgpt.finetune.{method}")
        out = folder / f"{method}-{strategy is None}"
        # LitGPT saves its command line beside the weights, and merges by it.
        sys.argv = ["litgpt", str(folder / "base"), *(f"--{name}={value}" for name, value in arguments.items())]
        script.setup(
            folder / "base",
            out,
            precision="32-true",
            devices=dist.get_world_size(),
            data=JSON(folder / "base" / "data.json", val_split_fraction=0.2, prompt_style=Default(), num_workers=0),
            train=TrainArgs(
                save_interval=None,
                log_interval=1,
                global_batch_size=4,
                micro_batch_size=2 // readers,
                lr_warmup_steps=1,
                epochs=2,
                max_steps=4,
            ),
            eval=EvalArgs(interval=2, max_new_tokens=4, max_iters=2),
            optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.05}},
            **arguments,
        )
        if dist.get_rank() == 0:
            saved = torch.load(out / "final" / file)
            found[method] = saved.get("model", saved), losses(out)
    return found


def losses(out: Path) -> list[float]:
    rows = [line.split(",") for line in next(out.rglob("metrics.csv")).read_text().splitlines()]
    return [float(row[rows[0].index("loss")]) for row in rows[1:] if row[rows[0].index("loss")]]


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [(2, '{"gx": 2}'), pytest.param(4, '{"gx": 2, "gz": 2}', marks=pytest.mark.families)],
)
def test_as_one_process(tmp_path: Path, ranks: int, strategy: str) -> None:
    pytest.importorskip("jsonargparse", reason="LitGPT's scripts need it")
    checkpoint(tmp_path / "base")
    wanted = run_ranks(finetune, 1, tmp_path, None)[0]
    found = run_ranks(finetune, ranks, tmp_path, strategy)[0]
    for method, (weights, values) in wanted.items():
        assert found[method][1] == pytest.approx(values, abs=1e-5) and len(values) == 8
        assert found[method][0].keys() == weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(found[method][0][name], tensor, atol=2e-5, rtol=2e-5)
