"""The U-Net recipe by itself, and on every grid against itself."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import axonn_tp
from axonn_recipes.models.unet import UNet, UNetConfig, cosine_schedule, diffuse
from axonn_recipes.models.unet_plan import unet_plan
from axonn_tp import Grid, LayerPlan, Mesh, Options, factorisations, place
from axonn_tp.comm.collectives import all_reduce
from axonn_tp.options import LAYOUTS
from tests.axonn_tp.test_grids import largest_error
from tests.distributed import meshes, run_ranks
from tests.matrix import thorough

SMALL = UNetConfig(3, 16, (1, 2, 3), 1, (1,), heads=4, groups=8, zero_init=False)
# Groups of four channels and more, which the cuts between eight ranks go through.
SPLIT = UNetConfig(3, 16, (1, 2), 1, (1,), heads=8, groups=4, zero_init=False)


def batch(images: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    clean, noise = torch.randn(2, images, 3, size, size, dtype=torch.float64)
    t = torch.randint(1000, (images,))
    return diffuse(clean, t, noise, cosine_schedule(1000)), t, noise


def test_every_parameter_matters_and_the_time_too() -> None:
    torch.manual_seed(1)
    model = UNet(SMALL).double()
    noisy, t, noise = batch(2)
    loss = model(noisy, t, noise)
    loss.backward()
    assert torch.equal(loss, F.mse_loss(model(noisy, t), noise))
    assert all(
        p.grad is not None and p.grad.abs().max() > 0 for name, p in model.named_parameters() if "qkv.bias" not in name
    )
    assert not torch.allclose(model(noisy, t), model(noisy, t + 5))


def test_zero_initialisation_predicts_nothing_at_first() -> None:
    model = UNet(UNetConfig(3, 16, (1, 2), 1, (1,), 2, 8))
    assert model(torch.randn(1, 3, 8, 8), torch.tensor([3])).abs().max() == 0


def test_schedule_keeps_all_signal_at_first_and_none_at_last() -> None:
    signal = cosine_schedule(100)
    assert signal.shape == (100,) and (signal[1:] < signal[:-1]).all()
    assert signal[0] > 0.999 and signal[-1] < 1e-6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"groups": 24}, "groups = 24 does not divide the 128 features of level 0"),
        ({"heads": 3}, "heads = 3 does not divide the 128 features of level 0"),
        ({"attention_levels": (4,)}, "names level 4, but there are 4"),
    ],
)
def test_sizes_that_cannot_be(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        UNetConfig(**options)


Expected = tuple[UNet, UNet, torch.Tensor]
"""The serial model before a step and after it, with its gradients, and the loss."""


def step_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(8)
    return batch(8, 4)


def serial_step(config: UNetConfig) -> Expected:
    torch.manual_seed(7)
    model = UNet(config).double()
    before, loss = copy.deepcopy(model), model(*step_batch())
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return before, model, loss.detach()


def one_step(expected: Expected, mesh: Mesh, options: Options) -> dict[str, float]:
    """Errors of the loss, the gradients and the weights after one step against the serial model."""
    before, after, wanted = expected
    parallel = axonn_tp.parallelize(copy.deepcopy(before), mesh, unet_plan(before.config), options)
    mine = parallel(*(mesh.shard_batch(tensor) for tensor in step_batch()))
    mine.backward()
    axonn_tp.sync_gradients(parallel.parameters(), mesh)
    loss = all_reduce(mine.detach().clone(), mesh, "batch") / mesh.grid.batch
    errors = {
        "loss": (loss - wanted).abs().item(),
        "gradients": largest_error(after, parallel, mesh, lambda p: p.grad),
    }
    torch.optim.SGD(parallel.parameters(), lr=0.1).step()
    return errors | {"weights": largest_error(after, parallel, mesh, lambda p: p.data)}


SOME = [Grid(4), Grid(1, 2, 1, 2), Grid(2, 1, 2)]
"""Of the grids of four ranks: each axis, and layouts in turns."""


def on_grids(expected: Expected, grids: list[Grid]) -> dict[str, dict[str, float]]:
    found = {}
    for index, mesh in enumerate(meshes(grids)):
        grid = mesh.grid
        for layout in LAYOUTS if grid == Grid(2, 2, 2) else (LAYOUTS[index % 2],):
            found[f"{grid} {layout}"] = one_step(expected, mesh, Options(layout=layout))
    return found


@pytest.mark.parametrize("grids", [SOME, thorough(list(factorisations(8)))], ids=["some", "eight"])
def test_on_grids(grids: list[Grid]) -> None:
    for found in run_ranks(on_grids, grids[0].world, serial_step(SPLIT), grids):
        for grid, errors in found.items():
            assert max(errors.values()) < 1e-10, (grid, errors)


def test_every_matrix_is_split() -> None:
    with torch.device("meta"):
        model = UNet(SPLIT)
    placed = {placement.name: placement.kind for placement in place(model, Grid(2, 2, 2), unet_plan(SPLIT))}
    matrices = {name for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    assert matrices <= set(placed)
    assert placed["down.0.block.conv1"] == "normal" and placed["middle1.block.norm2"] == "group_norm"
    assert {name for name, kind in placed.items() if kind == "self_contained"} == {
        name
        for name in matrices
        if name in ("first", "last") or name.endswith(("skip", "resample.conv")) or "downsample" in name
    }


def verified() -> list:
    mesh = Mesh.create(2, 2)
    wrong = {**unet_plan(SPLIT), "*.qkv": LayerPlan("normal")}
    found = []
    for plan in (unet_plan(SPLIT), wrong):
        torch.manual_seed(7)
        model = axonn_tp.parallelize(UNet(SPLIT).double(), mesh, plan)
        inputs = batch(2, 4)
        found.append(axonn_tp.first_difference(model, lambda model=model, inputs=inputs: model(*inputs), mesh, 1e-6))
    return found


def test_a_wrong_plan_is_found_among_convolutions() -> None:
    for right, wrong in run_ranks(verified, 4):
        assert right is None and wrong[0].endswith("proj")
