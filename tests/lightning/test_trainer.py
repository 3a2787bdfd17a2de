"""The Trainer with the strategy, beside one process in float64."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import Tensor
from torch.utils.data import DataLoader

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.lightning import AxonnStrategy
from axonn_plugins.hosts.lightning.trainer import _refuse_callbacks
from axonn_tp import Grid
from tests.distributed import run_ranks, same_on_all
from tests.lightning.models import BATCH, Language, groups, loader
from tests.matrix import thorough

GRIDS: dict[int, list[dict[str, Any]]] = {
    2: [{"gx": 2}, {"gz": 2}],
    4: [{"gx": 2, "gy": 2}, {"gx": 2, "gz": 2}, {"gy": 2, "state_dict_type": "sharded"}],
}


AVERAGES: tuple[type, ...] = (WeightAveraging, StochasticWeightAveraging)


class Module(L.LightningModule):
    """Logs what a script would; notes losses over readers."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.net = Language()
        self.seen = torchmetrics.SumMetric()
        self.automatic_optimization = not manual
        self.losses: list[float] = []
        self.logged: list[dict[str, float]] = []

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(ids)

    def training_step(self, ids: Tensor, number: int) -> Tensor:
        loss = self.net(ids, ids)
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        self.losses.append(self.trainer.strategy.reduce(loss.detach().clone()).item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(0.5 * loss)
            self.manual_backward(0.5 * self.net(ids, ids))
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            self.lr_schedulers().step()
        return loss

    def validation_step(self, ids: Tensor, number: int) -> None:
        self.seen.update(len(ids))
        self.log("seen", self.seen)
        self.log("val_loss", self.net(ids, ids), sync_dist=True)
        self.log("count", float(len(ids)), sync_dist=True, reduce_fx="sum")

    def on_validation_epoch_end(self) -> None:
        names = ("seen", "val_loss", "count")
        self.logged.append({name: self.trainer.callback_metrics[name].item() for name in names})

    def test_step(self, ids: Tensor, number: int) -> None:
        self.log("test_loss", self.net(ids, ids), sync_dist=True)

    def predict_step(self, ids: Tensor, number: int) -> Tensor:
        return self(ids).argmax(-1)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(groups(self), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(
    strategy: Any,
    folder: Path,
    resume: Any = None,
    manual: bool = False,
    readers: int | None = None,
    kind: type[Module] = Module,
    **changes: Any,
) -> dict[str, Any]:
    """Two epochs; after it tests, a validation, and predictions of an odd number of samples."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(1)
    module = kind(manual)
    best = ModelCheckpoint(folder, filename="{epoch}", monitor="val_loss", save_top_k=-1)
    given: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world,
        "strategy": strategy,
        "precision": "64-true",
        "max_epochs": 2,
        "accumulate_grad_batches": 1 if manual else 2,
        "gradient_clip_val": None if manual else 0.5,
        "callbacks": [best, EarlyStopping("val_loss")],
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(**given | changes)
    readers = readers or trainer.world_size
    trainer.fit(module, loader(readers), loader(readers, 8, 4), ckpt_path=resume)
    tested = trainer.test(module, loader(readers, 8, 4), verbose=False)[0]["test_loss"]
    of_best = trainer.test(module, loader(readers, 8, 4), ckpt_path="best", verbose=False)[0]["test_loss"]
    predicted = sum(len(batch) for batch in trainer.predict(module, loader(1, 9, 6)) or [])
    return {
        "steps": trainer.global_step,
        "losses": module.losses,
        "logged": module.logged,
        "tested": [tested, of_best],
        "predicted": predicted,
        "weights": sum(tensor.double().sum().item() for tensor in module.state_dict().values()),
    }


def shuffled(strategy: Any, average: type) -> dict[str, Any]:
    """Two epochs of data in an order that nobody has seeded but at the start, without the incomplete batch; weights are averaged."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(1)
    module, quiet = Module(), {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings: dict[str, Any] = {"swa_lrs": 1e-2, "swa_epoch_start": 1} if average is StochasticWeightAveraging else {}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        precision="64-true",
        max_epochs=2,
        callbacks=[average(**settings)],
        enable_checkpointing=False,
        **quiet,
    )
    data = torch.randint(37, (23, 7), generator=torch.Generator().manual_seed(3))
    trainer.fit(module, DataLoader(data, BATCH // trainer.world_size, shuffle=True, drop_last=True))
    weights = sum(tensor.double().sum().item() for tensor in module.state_dict().values())
    return {"steps": trainer.global_step, "losses": module.losses, "weights": weights}


class Measured(Module):
    """Takes norms of its gradients itself, and clips them by torch's function and by value."""

    def on_after_backward(self) -> None:
        grad = self.net.norm.weight.grad
        assert grad is not None
        self.losses.append(grad.norm().item())
        grad.clamp_(-1e-3, 1e-3)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for kind in (2, 3, "inf"):
            self.losses += [float(norm) for norm in grad_norm(self.net, kind).values()]
        self.losses.append(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1).item())


def again(strategy: Any) -> list[float]:
    """Losses of the search for a rate, of one epoch, and of another by another Trainer, whose optimizer is made for a model that is split already, and which
    averages a copy of it; numbers of parameters."""
    torch.manual_seed(1)
    module = Measured()
    for number in range(2):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        world = dist.get_world_size() if dist.is_initialized() else 1
        trainer = L.Trainer(
            accelerator="cpu",
            devices=world,
            strategy=strategy(),
            max_epochs=1,
            default_root_dir=same_on_all(tempfile.mkdtemp()),
            enable_checkpointing=number == 0,
            callbacks=[EMAWeightAveraging(decay=0.5)] if number else [],
            **quiet,
        )
        if number == 0:
            found = Tuner(trainer).lr_find(module, loader(trainer.world_size), num_training=4, update_attr=False)
            module.losses += found.results["loss"]
        trainer.fit(module, loader(trainer.world_size))
    counted = ModelSummary(module, max_depth=2)
    return [*module.losses, counted.total_parameters, counted.trainable_parameters, *counted.param_nums]


class Thawing(BaseFinetuning):
    """Trains two layers from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.net.up, pl_module.net.down])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group([pl_module.net.up, pl_module.net.down], optimizer, lr=5e-3)


class Frozen(Module):
    """Some layers are trained later."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def thawed(strategy: Callable[[], Any], folder: Path) -> list[float]:
    """Losses of three epochs, of which a run of the last goes on from the second's end."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    losses: list[float] = []
    for epochs, resume in ((2, None), (3, folder / "last.ckpt")):
        torch.manual_seed(1)
        module, world = Frozen(), dist.get_world_size() if dist.is_initialized() else 1
        callbacks = [Thawing(), ModelCheckpoint(folder, save_last=True)]
        trainer = L.Trainer(
            accelerator="cpu", devices=world, strategy=strategy(), max_epochs=epochs, callbacks=callbacks, **quiet
        )
        trainer.fit(module, loader(trainer.world_size), ckpt_path=resume)
        losses += module.losses
    return losses


class Bare(Module):
    """Calls torch's backward itself, in place of Lightning's."""

    def manual_backward(self, loss: Tensor, *rest: Any, **named: Any) -> None:
        loss.backward()


class Unreduced(Module):
    """A schedule goes by what each reader has logged for itself."""

    def on_validation_epoch_end(self) -> None:
        own = self.current_epoch * (1.0 if dist.get_rank() else -1.0)
        self.log("own", own)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "own"}}


def averaging(strategy: Any, folder: Path, resume: Any = None) -> dict[str, Any]:
    """Two epochs, or the second, whose validation is of averaged weights, which a checkpoint has in the model's place."""
    best = ModelCheckpoint(folder, filename="{epoch}", monitor="val_loss", save_top_k=-1)
    return fit(strategy, folder, resume, callbacks=[EMAWeightAveraging(decay=0.5), best])


def same(found: dict[str, Any], wanted: dict[str, Any], resumed: bool = False, within: float = 1e-9) -> None:
    half = len(wanted["losses"]) // 2 if resumed else 0
    assert found["steps"] == wanted["steps"]
    assert found["losses"] == pytest.approx(wanted["losses"][half:], abs=within)
    assert len(found["logged"]) == (1 if resumed else 2)
    for one, other in zip(found["logged"][::-1], wanted["logged"][::-1], strict=False):
        assert one == pytest.approx(other, abs=1e-5)
    assert found["tested"] == pytest.approx(wanted["tested"], abs=1e-5)
    assert found["weights"] == pytest.approx(wanted["weights"], abs=100 * within)


def every(folder: Path, all_grids: bool) -> list[dict[str, Any]]:
    world = dist.get_world_size()
    grids = [*enumerate(GRIDS[world])][0 if all_grids or world == 2 else 1 :]
    found = [fit(AxonnStrategy(**grid), folder / f"{world}-{number}") for number, grid in grids]
    if world == 2:
        found.append(fit(AxonnStrategy(gz=2), folder / "manual-2", manual=True))
        found.append(fit(AxonnStrategy(gx=2), folder / "from-one", folder / "one" / "epoch=0.ckpt"))
        found += [shuffled(AxonnStrategy(gz=2), average) for average in AVERAGES]
        found.append({"again": [again(lambda grid=grid: AxonnStrategy(**grid)) for grid in GRIDS[2]]})
        sharded = functools.partial(AxonnStrategy, state_dict_type="sharded")
        found.append({"averaging": averaging(sharded(gx=2), folder / "ema")})
        found.append({"averaging": averaging(sharded(gz=2), folder / "again", folder / "ema" / "epoch=0.ckpt")})
        found.append(
            {"thawed": [thawed(lambda grid=grid: AxonnStrategy(**grid), folder / str(grid)) for grid in GRIDS[2]]}
        )
        with pytest.raises(ConfigError, match=r"^training_step called loss.backward\(\), .* call self.manual_backward"):
            fit(AxonnStrategy(gz=2), folder / "bare", manual=True, kind=Bare)
        with pytest.raises(ConfigError, match="^AxonnStrategy: options of the optimizers, .* sync_dist=True"):
            fit(AxonnStrategy(gz=2), folder / "unreduced", kind=Unreduced, max_epochs=3)
        with pytest.raises(ConfigError, match="^BatchSizeFinder .* tries batches in one process, and there are 2"):
            _refuse_callbacks(SimpleNamespace(callbacks=[BatchSizeFinder()], strategy=SimpleNamespace(grid=Grid(gx=2))))
        with pytest.raises(ConfigError, match="^ModelPruning prunes each rank's part of a weight by itself"):
            fit(AxonnStrategy(gx=2), folder / "pruned", callbacks=[ModelPruning("l1_unstructured", amount=0.5)])
        assert refused() == ["AxonnStrategy: gx*gy*gz = 3*1*1 = 3 does not divide the 2 ranks of this run"] * 2
    else:
        if all_grids:
            found.append(fit(AxonnStrategy(gz=2), folder / "from-two", folder / "2-0" / "epoch=0.ckpt"))
        found.append(fit(AxonnStrategy(gx=4), folder / "from-shards", folder / "4-2" / "epoch=0.ckpt"))
    return found


def refused() -> list[str]:
    with pytest.raises(ConfigError) as caught:
        L.Trainer(accelerator="cpu", devices=2, strategy=AxonnStrategy(gx=3), logger=False)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, str(caught.value).partition(";")[0])
    return everyone


@pytest.mark.parametrize("all_grids", [False, thorough(True)])
def test_as_one_process_and_resumed_on_other_grids(tmp_path: Path, all_grids: bool) -> None:
    wanted, manual = fit("auto", tmp_path / "one"), fit("auto", tmp_path / "manual", manual=True)
    averaged, twice = [shuffled("auto", average) for average in AVERAGES], again(lambda: "auto")
    later = thawed(lambda: "auto", tmp_path / "thawed")
    smooth = averaging("auto", tmp_path / "smooth")
    two = run_ranks(every, 2, tmp_path, all_grids)
    four = run_ranks(every, 4, tmp_path, all_grids)
    for found in two:
        same(found[0], wanted)
        same(found[1], wanted)
        same(found[2], manual)
        same(found[3], wanted, resumed=True)
        assert [pytest.approx(losses, rel=2e-5) for losses in found[6]["again"]] == [twice, twice]
        assert [pytest.approx(losses, rel=2e-5) for losses in found[9]["thawed"]] == [later, later]
        for number, resumed in enumerate(found[7:9]):
            # One process keeps the average, with which the model changes places in validation, in float32.
            same(resumed["averaging"], smooth, resumed=bool(number), within=2e-6)
        for full, serial in zip(found[4:6], averaged, strict=True):
            assert full["steps"] == serial["steps"] == 10
            assert full["losses"] == pytest.approx(serial["losses"], abs=1e-9)
            # One process averages in float32: it copies the module before it makes that double.
            assert full["weights"] == pytest.approx(serial["weights"], abs=1e-5)
        assert found[0]["predicted"] == found[1]["predicted"] == wanted["predicted"] == 9
    for found in four:
        number = 3 if all_grids else 2
        assert len(found) == number + (2 if all_grids else 1)
        for full in found[:number]:
            same(full, wanted)
        for resumed in found[number:]:
            same(resumed, wanted, resumed=True)
        assert {full["predicted"] for full in found[: number - 1]} == {9}
    assert sum(found[number - 1]["predicted"] for found in four) == 2 * 9
    assert (tmp_path / "4-2" / "epoch=1.ckpt" / "manifest.json").is_file()
    # One process reads weights before it makes the model double.
    back = fit("auto", tmp_path / "back", tmp_path / "4-1" / "epoch=0.ckpt")
    same(back, wanted, resumed=True, within=1e-6)
