"""Blocks of Python in READMEs and on the site run as they stand, with the names that their readers have already.

Those that need one process are in every run; those of ranks are `thorough`, eight ranks for all of them, and Lightning's apart.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

import axonn_tp
import samo
import ted_moe
from axonn_plugins.cluster.launch import free_port, launch
from tests.deepspeed.training import deepspeed
from tests.distributed import compiled
from tests.docs.texts import BLOCKS

RANKS, WIDTH, HIDDEN = 8, 16, 64
Place = tuple[str, int]
Namespace = dict[str, Any]


def places() -> Iterator[tuple[Place, str]]:
    """Blocks by file and number."""
    seen: Counter[str] = Counter()
    for block in BLOCKS:
        if block.language == "python":
            yield (block.file, seen[block.file]), block.text
            seen[block.file] += 1


PYTHON = dict(places())
LIGHTNING = "plugins/axonn_plugins/hosts/lightning/README.md"
ELSEWHERE = {
    ("docs/tutorials/deepspeed.md", 0): "tests/docs/test_tutorial.py runs it with each configuration of its page",
    ("docs/tutorials/deepspeed.md", 1): "tests/docs/test_tutorial.py gives it the weights that the script has saved",
}
"""Blocks that this file does not run, and who does."""
ALONE: tuple[Place, ...] = (
    ("README.md", 1),
    ("docs/tutorials/lightning.md", 0),
    ("docs/tutorials/pruning.md", 0),
    ("plugins/axonn_plugins/planner/README.md", 0),
    ("samo/README.md", 0),
    ("samo/README.md", 1),
    ("samo/README.md", 2),
    ("ted_moe/README.md", 1),
)
"""Blocks that need no other rank."""
MAKE_GROUPS: tuple[Place, ...] = (
    ("README.md", 0),
    ("recipes/axonn_recipes/examples/elastic/README.md", 0),
    ("plugins/axonn_plugins/pccl/README.md", 0),
    ("README.md", 2),
)
"""Blocks that make the process group, in the order in which they run; the last one's stays."""
TOGETHER = (("docs/design.md", 0), ("docs/design.md", 1))
"""A class, and what uses it."""
OF_LIGHTNING = {(LIGHTNING, 0): 8, (LIGHTNING, 1): 4}
"""Blocks in which Lightning makes the process group, and their ranks."""
SPLIT = (("axonn_tp/README.md", 2), ("axonn_tp/README.md", 4), ("docs/tutorials/ledger.md", 0))
"""Blocks whose reader has split the model."""
ON_RANK_0 = (("axonn_tp/README.md", 5),)
SHORTER = {
    "gradient_clip_val=1.0)": "gradient_clip_val=1.0, max_epochs=2)",
    "engine.global_steps == 1000": "engine.global_steps == 2",
    'for gpu in ("a100", "h200", "b200") for size in (4, 8, 64)': 'for gpu in ("a100",) for size in (8,)',
    "(2**power for power in range(7, 15))": "(128,)",
}
"""Parts of blocks that take long, and what runs in their place."""
IN_ONE_FOLDER = ("axonn_tp", "README", "recipes/axonn_recipes/examples")
"""Beginnings of the files whose blocks write and read checkpoints that all ranks see."""
CONFIG = {
    "train_batch_size": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "axonn": {"tensor_parallel": {"gx": "auto", "gz": 2, "plan": "auto", "tokens_per_sample": 1}},
}


class Model(nn.Module):
    """A pair of linears whose output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, inputs: Tensor, targets: Tensor | float = 0.0) -> Tensor:
        """Mean square of what is off."""
        return (self.down(torch.relu(self.up(inputs))) - targets).square().mean()


class Module(lightning.LightningModule):
    """The same for Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def training_step(self, batch: Tensor) -> Tensor:
        """The loss."""
        return self.model(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return adamw(self)


def rows() -> Any:
    """A data set."""
    return [*torch.randn(64, WIDTH)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def readers(place: Place, folder: Path) -> Namespace:
    """Names that the reader of a block has: a model, data and what stands above it."""
    torch.manual_seed(1)
    file, model, batch = place[0], Model(), torch.randn(RANKS, WIDTH)
    given: Namespace = {
        "__name__": "reader", "torch": torch, "dist": dist, "deepspeed": deepspeed, "lightning": lightning,
        "axonn_tp": axonn_tp, "samo": samo, "ted_moe": ted_moe, "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
        "model": model, "other_model": Model(), "first": batch, "last": batch, "hidden": WIDTH, "step": 100, "plan": "auto",
        "expert": nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)),
        "hidden_states": torch.randn(2, 4, WIDTH), "target": torch.randn(2, 4, WIDTH),
        "loss_of": lambda model, batch: model(batch), "batches": [batch, batch], "dataset": rows(),
        "Model": lambda: transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder / "folder")),
        "optimizer": adamw(model), "masks": samo.magnitude(model, sparsity=0.5),
    }  # fmt: skip
    if place == ("samo/README.md", 1):
        samo.write_masks("masks.safetensors", given["masks"])
    if place == ("samo/README.md", 2):
        given["optimizer"] = samo.Optimizer(lambda groups: torch.optim.AdamW(groups, lr=1e-3), model)
    if not dist.is_initialized():
        return given
    mesh = given["mesh"] = axonn_tp.Mesh.create(gx=2, gz=2)
    given["batch"] = (batch, batch) if file == "axonn_tp/README.md" else mesh.shard_batch(batch)
    if file == "ted_moe/README.md":
        given["groups"] = ted_moe.Groups(ted_moe.Topology(world=RANKS, tensor=2, expert=4))
    if file == "docs/tutorials/timeline.md":
        given["train_a_step"] = lambda: model(batch).backward()
    if place in SPLIT:
        given["model"] = axonn_tp.parallelize(model, mesh, plan="auto")
        given["optimizer"] = adamw(model)
        given["scheduler"] = torch.optim.lr_scheduler.ConstantLR(given["optimizer"])
    return given


def run(place: Place, given: Namespace) -> None:
    """Execute one block, with what takes long made shorter."""
    text = PYTHON[place]
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    exec(compile(text, f"{place[0]}, block {place[1]}", "exec"), given)


def of_ranks() -> list[Place]:
    """Blocks of the eight ranks, those that make groups first."""
    others = (*MAKE_GROUPS, *TOGETHER, *ELSEWHERE, *ALONE, *OF_LIGHTNING)
    return [*MAKE_GROUPS, *TOGETHER, *(place for place in PYTHON if place not in others)]


def run_on_rank(folder: Path, ports: list[int]) -> list[Place]:
    """Run them on this rank, each group on a port of its own; those that ran."""
    torch.set_num_threads(1)
    here = folder / os.environ["RANK"]
    here.mkdir()
    ran: list[Place] = []
    system: Namespace = {}
    for place in of_ranks():
        if place in MAKE_GROUPS and dist.is_initialized():
            deepspeed.comm.destroy_process_group() if deepspeed.comm.is_initialized() else dist.destroy_process_group()
        if place in MAKE_GROUPS:
            os.environ["MASTER_PORT"] = str(ports.pop())
        os.chdir(folder if place[0].startswith(IN_ONE_FOLDER) else here)
        given = readers(place, folder) | system
        if place not in ON_RANK_0 or not dist.get_rank():
            before = [p.detach().clone() for p in given["model"].parameters()]
            run(place, given)
            check(place, given, before)
            system = {"GradientNoise": given["GradientNoise"]} if place == TOGETHER[0] else {}
        ran.append(place)
        if dist.is_initialized():
            dist.barrier()
    return ran


def check(place: Place, given: Namespace, before: list[Tensor]) -> None:
    """Assert that a block has done its work."""
    if "engine" in given:
        assert given["engine"].global_steps == 2
        given["engine"].destroy()
    if place == TOGETHER[1]:
        assert any((p != q).any() for p, q in zip(given["model"].parameters(), before, strict=True))
    if place in (("axonn_tp/README.md", 1), ("docs/tutorials/ledger.md", 0)):
        assert given["loss"] > 0 and all(p.grad is not None for p in given["model"].parameters())
    if place == ("axonn_tp/README.md", 4):
        assert given["extra"] == {"position": 100}


def run_lightning(place: Place, folder: Path) -> None:
    """Lightning's blocks in a rank that torchrun might have started."""
    torch.set_num_threads(1)
    os.environ["TORCHELASTIC_RUN_ID"] = os.environ["GROUP_RANK"] = "0"
    os.chdir(folder)
    model, data = Model(), rows()
    given: Namespace = {
        "L": lightning, "module": Module(), "datamodule": DataLoader(data, 8), "model": model, "optimizer": adamw(model),
        "DataLoader": DataLoader, "data": data, "loss_of": lambda model, batch: model(batch),
    }  # fmt: skip
    if place == (LIGHTNING, 1):
        from axonn_plugins.hosts.lightning import AxonnStrategy

        given["AxonnStrategy"] = AxonnStrategy
    run(place, given)


def saved_by_one_process(folder: Path) -> None:
    """A checkpoint for the Trainer's block to resume."""
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=folder
    )
    trainer.fit(Module(), DataLoader(rows(), 8))
    trainer.save_checkpoint(folder / "last.ckpt")


def in_process(function: Callable[..., Any], *arguments: Any) -> None:
    """Call it in a process of its own."""
    launch(function, 1, *arguments)


def test_every_block_runs_somewhere() -> None:
    once = [*ALONE, *OF_LIGHTNING, *ELSEWHERE, *of_ranks()]
    assert sorted(once) == sorted(PYTHON)
    texts = "".join(PYTHON.values())
    assert all(long in texts for long in SHORTER)


@pytest.mark.parametrize("place", ALONE, ids=lambda place: f"{place[0]}-{place[1]}")
def test_alone(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = readers(place, tmp_path)
    run(place, given)
    if "masks" in PYTHON[place]:
        assert all(mask.dtype == torch.bool for mask in given["masks"].values())


@pytest.mark.thorough
def test_on_ranks(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config: Any = transformers.AutoConfig.for_model("llama", **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "folder")
    compiled()
    ports = [free_port() for _ in MAKE_GROUPS]
    assert all(ran == of_ranks() for ran in launch(run_on_rank, RANKS, tmp_path, ports))
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("place", OF_LIGHTNING, ids=lambda place: f"{place[0]}-{place[1]}")
def test_of_lightning(place: Place, tmp_path: Path) -> None:
    in_process(saved_by_one_process, tmp_path)
    launch(run_lightning, OF_LIGHTNING[place], place, tmp_path)
    assert (tmp_path / "run.ckpt").exists() == (place == (LIGHTNING, 1))
