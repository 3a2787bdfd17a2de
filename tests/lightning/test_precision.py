"""The Trainer in 16-bit precisions, and what else one start of ranks is enough for, beside one process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.lightning import AxonnStrategy
from tests.distributed import run_ranks
from tests.lightning.models import Language, loader, loss_of
from tests.matrix import thorough

SAMPLES = 12
CASES: dict[str, dict[str, Any]] = {
    "bf16-true": {"precision": "bf16-true"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "16-true": {"precision": "16-true"},
    "16-mixed": {},
    "value": {"precision": "64-true", "gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "shards": {"precision": "64-true"},
    "dropout": {"precision": "64-true"},
}


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader(self.trainer.world_size, SAMPLES)


class Module(L.LightningModule):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.net, self.dropout = Language(), nn.Dropout(dropout)
        self.losses: list[float] = []

    def training_step(self, ids: Tensor, number: int) -> Tensor:
        # Dropout of whole features, and of those that are split over x.
        net, x = self.net, self.dropout(self.net.embedding(ids))
        inner = self.dropout(nn.functional.gelu(net.up(net.norm(x))))
        loss = loss_of(net.head(x + net.down(inner)).float(), ids)
        self.losses.append(self.trainer.strategy.reduce(loss.detach().clone()).item())
        return loss

    def on_train_start(self) -> None:
        # Ranks whose random states have come apart.
        torch.rand(dist.get_rank())

    def test_step(self, ids: Tensor, number: int) -> None:
        self.log("test_loss", loss_of(self.net(ids).float(), ids), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Adam's epsilon is 0 in float16.
        if self.net.up.weight.dtype == torch.float16:
            return torch.optim.SGD(self.parameters(), lr=0.1)
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(case: str, folder: Path, **strategy: Any) -> dict[str, Any]:
    """An epoch, and a test of the checkpoint, which is of weights alone."""
    if strategy and case == "shards":
        strategy["state_dict_type"] = "sharded"
    given: Any = AxonnStrategy(**strategy) if strategy else "auto"
    if strategy and case == "value":
        os.environ["AXONN_STRATEGY"], given = json.dumps(strategy), "axonn"
    torch.manual_seed(1)
    module = Module(0.3 if case == "dropout" else 0.0)
    if case == "shards":
        module.net.compile(backend="eager")  # before it is split
    plugins = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=given,
        plugins=plugins if case == "16-mixed" else None,
        max_epochs=1,
        callbacks=[ModelCheckpoint(folder, filename=f"{case}-{dist.get_world_size()}", save_weights_only=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **CASES[case],
    )
    assert trainer.world_size == 1
    trainer.fit(module, Data())
    path = trainer.checkpoint_callback.best_model_path
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    (tested,) = trainer.test(module, loader(trainer.world_size), ckpt_path=path, verbose=False)
    return {"losses": module.losses, "tested": tested["test_loss"], "dtype": module.net.up.weight.dtype, "path": path}


def in_fabric(precision: str, strategy: Any) -> list[float]:
    """Losses of a loop that clips by value."""
    fabric = L.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, precision=precision)
    fabric.launch()
    torch.manual_seed(1)
    model: Any = torch.compile(Language(), backend="eager") if precision == "64-true" else Language()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    losses = []
    for ids in fabric.setup_dataloaders(loader(fabric.world_size)):
        loss = loss_of(model(ids).float(), ids)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, clip_val=1e-2)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


IN_FABRIC = ("64-true", "16-true", "bf16-true", "bf16-mixed")


def every(folder: Path, precisions: tuple[str, ...], **strategy: Any) -> dict[str, Any]:
    found: dict[str, Any] = {case: fit(case, folder, **strategy) for case in CASES}
    for precision in precisions:
        found[f"fabric {precision}"] = in_fabric(precision, AxonnStrategy(**strategy) if strategy else "auto")
    return found


def split(folder: Path, precisions: tuple[str, ...]) -> dict[str, Any]:
    refused()
    return every(folder, precisions, gx=2)


def refused() -> None:
    """Other batches for ranks of one reader, and a compiled module."""
    named = {"accelerator": "cpu", "devices": 2, "logger": False, "max_epochs": 1, "enable_checkpointing": False}
    trainer = L.Trainer(strategy=AxonnStrategy(gx=2), enable_model_summary=False, enable_progress_bar=False, **named)
    with pytest.raises(ConfigError, match="the batch of training_step differs between ranks 0 and 1"):
        trainer.fit(Module(0.0), loader(1, seed=dist.get_rank()))
    with pytest.raises(RuntimeError, match="compiled"):
        L.Trainer(strategy=AxonnStrategy(gx=2), **named).fit(torch.compile(Module(0.0)), loader(1))


@pytest.mark.parametrize("precisions", [IN_FABRIC[:2], thorough(IN_FABRIC)], ids=len)  # test_fabric has the others
def test_as_one_process(tmp_path: Path, precisions: tuple[str, ...]) -> None:
    (wanted,) = run_ranks(every, 1, tmp_path, precisions)
    both = run_ranks(split, 2, tmp_path, precisions)
    for case in [case for case in wanted if case not in CASES]:
        one = wanted.pop(case)
        assert both[0][case] == both[1][case] == pytest.approx(one, abs=1e-5 if "64" in case else 2e-2)
    for case, one in wanted.items():
        first, second = (found[case] for found in both)
        assert (first["losses"], first["tested"]) == (second["losses"], second["tested"])
        assert first["dtype"] == one["dtype"]
        if case == "dropout":
            continue
        exact = CASES[case].get("precision") == "64-true"
        assert first["losses"] == pytest.approx(one["losses"], abs=1e-6 if exact else 2e-2)
        assert first["tested"] == pytest.approx(one["tested"], abs=1e-6 if exact else 2e-2)
        if case == "shards":
            continue
        saved, serial = (torch.load(found["path"], weights_only=False) for found in (first, one))
        assert saved.keys() == serial.keys() and "optimizer_states" not in saved
        for name, tensor in serial["state_dict"].items():
            assert (saved["state_dict"][name].shape, saved["state_dict"][name].dtype) == (tensor.shape, tensor.dtype)
            if exact:
                torch.testing.assert_close(saved["state_dict"][name], tensor)
    Module.load_from_checkpoint(both[0]["value"]["path"], dropout=0.0)
