"""Blocks of Python in READMEs and on the site run as they stand, on eight ranks, with the names that their readers have already."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import axonn_tp
import samo
import ted_moe
from axonn_plugins.cluster.launch import launch
from tests.deepspeed.training import deepspeed
from tests.distributed import compiled
from tests.docs.texts import BLOCKS

RANKS, WIDTH, HIDDEN = 8, 16, 64
Namespace = dict[str, Any]


def places() -> Iterator[tuple[tuple[str, int], str]]:
    """Blocks by file and number."""
    seen: Counter[str] = Counter()
    for block in BLOCKS:
        if block.language == "python":
            yield (block.file, seen[block.file]), block.text
            seen[block.file] += 1


PYTHON = dict(places())
ELSEWHERE = {
    ("docs/tutorials/deepspeed.md", 0): "tests/docs/test_tutorial.py runs it with each configuration of its page",
    ("plugins/axonn_plugins/hosts/lightning/README.md", 0): "Lightning starts ranks: tests/lightning/test_examples.py",
    ("plugins/axonn_plugins/hosts/lightning/README.md", 1): "Fabric starts ranks: tests/lightning/test_examples.py",
    (
        "plugins/axonn_plugins/planner/README.md",
        0,
    ): "864 searches, minutes of a processor; its names are checked by test_blocks.py",
}
"""Blocks that this file does not run, and why."""
ALONE = (("README.md", 1), ("docs/tutorials/lightning.md", 0))
"""Blocks that only make Lightning's objects, in a process without a group."""
MAKE_GROUPS = (
    ("README.md", 0),
    ("recipes/axonn_recipes/examples/elastic/README.md", 0),
    ("plugins/axonn_plugins/pccl/README.md", 0),
    ("README.md", 2),
)
"""Blocks that make the process group, in the order in which they run; the last one's stays."""
ONE_RANK = (("axonn_tp/README.md", 5),)
CONFIG = {
    "train_batch_size": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "axonn": {"tensor_parallel": {"gx": "auto", "gz": 2, "plan": "auto"}},
}


class Model(nn.Module):
    """A pair of linears whose output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, inputs: Tensor, targets: Tensor | float = 0.0) -> Tensor:
        """Mean square of what is off."""
        return (self.down(torch.relu(self.up(inputs))) - targets).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def readers(file: str, folder: Path) -> Namespace:
    """Names that the reader of a block has: a model, data and what stands above it."""
    torch.manual_seed(1)
    model, batch = Model(), torch.randn(RANKS, WIDTH)
    given: Namespace = {
        "__name__": "reader",
        "torch": torch, "dist": dist, "deepspeed": deepspeed, "lightning": lightning, "axonn_tp": axonn_tp, "samo": samo, "ted_moe": ted_moe,
        "model": model, "other_model": Model(), "first": batch, "last": batch, "hidden": WIDTH, "step": 100, "plan": "auto",
        "expert": nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)),
        "hidden_states": torch.randn(2, 4, WIDTH), "target": torch.randn(2, 4, WIDTH),
        "loss_of": lambda model, batch: model(batch), "batches": [batch, batch], "dataset": [*torch.randn(64, WIDTH)],
        "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
        "Model": lambda: transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder / "folder")),
    }  # fmt: skip
    given["masks"] = samo.magnitude(model, sparsity=0.5)
    if not dist.is_initialized():
        return given
    mesh = given["mesh"] = axonn_tp.Mesh.create(gx=2, gz=2)
    given["batch"] = mesh.shard_batch(batch)
    if file == "axonn_tp/README.md":
        given["batch"] = (batch, batch)
    if file == "ted_moe/README.md":
        given["groups"] = ted_moe.Groups(ted_moe.Topology(world=RANKS, tensor=2, expert=4))
    if file == "samo/README.md":
        samo.write_masks(folder / f"{dist.get_rank()}" / "masks.safetensors", given["masks"])
        given["optimizer"] = samo.Optimizer(lambda groups: torch.optim.AdamW(groups, lr=1e-3), model, given["masks"])
    if file.startswith("docs/tutorials/timeline"):
        given["train_a_step"] = lambda: model(batch).backward()
    return given


def split(given: Namespace) -> None:
    """The model of blocks behind the one that splits it, its optimizer and scheduler."""
    model = given["model"] = axonn_tp.parallelize(given["model"], given["mesh"], plan="auto")
    given["optimizer"] = adamw(model)
    given["scheduler"] = torch.optim.lr_scheduler.ConstantLR(given["optimizer"])


SPLIT = (("axonn_tp/README.md", 2), ("axonn_tp/README.md", 4), ("docs/tutorials/ledger.md", 0))


def ended_soon(text: str) -> str:
    """A block that trains for a thousand steps, for two."""
    return text.replace("== 1000", "== 2")


def run_blocks(folder: Path) -> list[tuple[str, int]]:
    """Run all of them on this rank; those that ran."""
    ran = []
    here = folder / os.environ["RANK"]
    here.mkdir()
    for place in (*MAKE_GROUPS, *(one for one in PYTHON if one not in (*MAKE_GROUPS, *ELSEWHERE, *ALONE))):
        if place in MAKE_GROUPS and dist.is_initialized():
            deepspeed.comm.destroy_process_group() if deepspeed.comm.is_initialized() else dist.destroy_process_group()
        # Checkpoints are in a folder that all ranks see.
        os.chdir(folder if place[0].startswith(("axonn_tp", "README", "recipes/axonn_recipes/examples")) else here)
        if place in ONE_RANK and dist.get_rank():
            continue
        given = readers(place[0], folder)
        if place in SPLIT:
            split(given)
        exec(compile(ended_soon(PYTHON[place]), f"{place[0]}, block {place[1]}", "exec"), given)
        ran.append(place)
        if "engine" in given:
            assert given["engine"].global_steps == 2
            given["engine"].destroy()
        if dist.is_initialized():
            dist.barrier()
    return ran


def test_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "folder")
    for place in ALONE:
        exec(PYTHON[place], readers(place[0], tmp_path))
    compiled()
    ranks = launch(run_blocks, RANKS, tmp_path)
    run = {*ranks[0], *ALONE}
    assert run | {*ELSEWHERE} == {*PYTHON} and not run & {*ELSEWHERE}
    assert (tmp_path / "model.safetensors").exists()
