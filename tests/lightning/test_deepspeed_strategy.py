"""Lightning's own DeepSpeedStrategy with the block, beside one process. It starts on GPUs alone, which is what is looked past here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.accelerators import CPUAccelerator as FabricsCPU
from lightning.fabric.strategies import DeepSpeedStrategy as FabricsStrategy
from lightning.fabric.strategies import deepspeed as in_fabric
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies import deepspeed as in_trainer

import axonn_plugins
from axonn_plugins.config import ConfigError
from tests.distributed import run_ranks
from tests.lightning.models import Language, groups, loader
from tests.lightning.test_trainer import fit, same
from tests.matrix import thorough

axonn_plugins.activate()
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a kernel that nothing here needs
GRIDS: dict[int, list[dict[str, int]]] = {
    2: [{"gx": 2}, {"gz": 2}],
    4: [{"gx": 2, "gz": 2}, {"gy": 2}],
}
PLANE = {"gx": 2, "gy": 2}
EPOCHS, STAGE = 2, 1


class Devices(CPUAccelerator):
    get_parallel_devices = staticmethod(lambda devices: [torch.device("cpu", 0)] * devices)


class FabricsDevices(FabricsCPU):
    get_parallel_devices = staticmethod(lambda devices: [torch.device("cpu", 0)] * devices)


@contextmanager
def on_cpu() -> Iterator[None]:
    with mock.patch.multiple(in_trainer, CUDAAccelerator=CPUAccelerator, _validate_device_index_selection=id):
        with mock.patch.multiple(in_fabric, CUDAAccelerator=FabricsCPU, _validate_device_index_selection=id):
            yield


def config(grid: dict[str, Any], **more: Any) -> dict[str, Any]:
    zero = {"stage": STAGE, "reduce_bucket_size": 10**5, "allgather_bucket_size": 10**5}
    return {"zero_optimization": zero, "axonn": {"tensor_parallel": {**grid, "plan": "auto"}}, **more}


def readers_of(grid: dict[str, int]) -> int:
    return dist.get_world_size() // grid.get("gx", 1) // grid.get("gy", 1)


def by_trainer(grid: dict[str, int], folder: Path, resume: Path | None = None) -> dict[str, Any]:
    strategy = DeepSpeedStrategy(config=config(grid))
    return fit(strategy, folder, resume, readers=readers_of(grid), accelerator=Devices(), precision="32-true")


def by_fabric(grid: dict[str, int] | None, save: Path | None = None, resume: Path | None = None) -> list[float]:
    """Two epochs of shuffled samples, one batch a step; stopped after one where it saves."""
    strategy = FabricsStrategy(config=config(grid, gradient_clipping=0.5)) if grid is not None else "auto"
    ranks = dist.get_world_size() if grid is not None else 1
    fabric = L.Fabric(accelerator=FabricsDevices(), strategy=strategy, devices=ranks)
    fabric.launch()
    torch.manual_seed(1)
    model = Language()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(groups(model), lr=1e-2))
    batches = fabric.setup_dataloaders(loader(1 if grid is None else readers_of(grid), shuffle=True))
    state, losses = {"model": model, "optimizer": optimizer, "epoch": 0}, []
    if resume is not None:
        fabric.load(resume, state)
        for _ in range(state["epoch"]):
            list(batches)
    while state["epoch"] < (1 if save else EPOCHS):
        for batch in batches:
            loss = model(batch, batch)
            fabric.backward(loss, model=model)
            if grid is None:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(fabric.all_reduce(loss.detach().clone()).item())
        state["epoch"] += 1
    if save is not None:
        fabric.save(save, state)
    return losses


def refused() -> str:
    with pytest.raises(ConfigError) as caught:
        fit(
            DeepSpeedStrategy(config=config({"gz": "auto"})),
            Path(),
            readers=1,
            accelerator=Devices(),
            precision="32-true",
        )
    return str(caught.value)


def every(folder: Path) -> list[Any]:
    ranks = dist.get_world_size()
    grids = GRIDS[ranks] + ([PLANE] if ranks == 4 else [])
    with on_cpu():
        trained = [by_trainer(grid, folder / f"{ranks}-{number}") for number, grid in enumerate(grids)]
        looped = [by_fabric(grid) for grid in grids]
        if ranks == 4:
            return [
                trained,
                looped,
                by_trainer({"gy": 2, "gz": 2}, folder / "resumed", folder / "2-0" / "epoch=0.ckpt"),
            ]
        by_fabric({"gx": 2}, save=folder / "half")
        looped.append(by_fabric({"gz": 2}, resume=folder / "half"))
        return [trained, looped, refused()]


@pytest.mark.parametrize("on_four", [False, thorough(True)])
def test_as_one_process(tmp_path: Path, on_four: bool) -> None:
    wanted = fit("auto", tmp_path / "one", precision="32-true")
    loop = by_fabric(None)
    two, four = run_ranks(every, 2, tmp_path), run_ranks(every, 4, tmp_path) if on_four else []
    for trained, looped, last in (*two, *four):
        for found in trained:
            same(found, wanted, within=4e-5)
        for losses in looped:
            assert losses == pytest.approx(loop[-len(losses) :], abs=4e-5)
        if isinstance(last, str):
            assert 'has sizes that are "auto"' in last and len(looped[-1]) == len(loop) // 2
        else:
            same(last, wanted, resumed=True, within=4e-5)
    assert sum(found[0][1]["predicted"] for found in two) == 2 * wanted["predicted"]
