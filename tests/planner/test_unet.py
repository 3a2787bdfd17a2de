"""U-Nets of 003: their sizes against the recipe's, the equations with convolutions, and the command."""

import json

import numpy as np
import pytest
import torch

from axonn_plugins import cli
from axonn_plugins.planner import axonn, fourd, machine, model
from axonn_plugins.planner.axonn import Bandwidths, Grids, Repeats, layer_communication
from axonn_plugins.planner.layers import Linear
from axonn_plugins.planner.setting import Setting
from axonn_plugins.planner.unet import UNet
from axonn_recipes.models import unet as recipe
from axonn_tp import Grid
from axonn_tp.layers.conv import conv_collectives
from axonn_tp.layers.linear_split import LinearSplit

PERLMUTTER = machine.load("perlmutter")


def one(*sizes):
    return Grids(*(np.array([size]) for size in sizes))


@pytest.mark.parametrize("multipliers", [(1, 2, 2, 2), (1, 2, 3)])
@pytest.mark.parametrize("blocks", [1, 3])
def test_parameters_are_the_recipes(multipliers, blocks):
    with torch.device("meta"):
        real = recipe.UNet(recipe.UNetConfig(3, 128, multipliers, blocks, (1, 2), heads=4))
    said = UNet("any", 128, multipliers=multipliers, blocks_of_a_level=blocks)
    assert said.parameters == sum(parameter.numel() for parameter in real.parameters())


def test_the_papers_are_about_as_large_as_their_names():
    sizes = [model.load(f"unet-{name}").parameters / 1e9 for name in ("250m", "500m", "1b", "2b", "4b")]
    assert sizes == pytest.approx([0.25, 0.5, 1, 2, 4], rel=0.17)
    assert UNet("CIFAR-10", 128).parameters / 1e6 == pytest.approx(50, rel=0.06)  # 003, section VI-A


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_send_what_axonn_tp_says(transposed, stride):
    grid, samples, image = Grid(2, 4, 2, 1), 4, 8
    conv = torch.nn.Conv2d(16, 32, 3, stride, padding=1, device="meta")
    taken, given = image**2, (image // stride) ** 2
    split = LinearSplit(transposed=transposed, takes="features", gives="features")
    counted = dict.fromkeys("xyz", 0.0)
    for collective in conv_collectives(conv, samples * taken // 2, samples * given // 2, grid, split):
        counted[collective.axis] += 2 * float(collective.sent)
    linear = Linear("conv", 16, 32, transposed, taken, given, 9)
    part = layer_communication(linear, samples, one(2, 4, 2, 1), Bandwidths(*np.ones((4, 1))), Repeats())
    forward, backward = ("x", "y") if transposed else ("y", "x")
    said = {"z": part.gather[0] + part.scatter[0], forward: part.forward[0], backward: part.backward[0]}
    assert counted == pytest.approx(said)


def test_flops_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        real = recipe.UNet(recipe.UNetConfig(3, 64, (1, 2), 1, (1,), heads=4))
        with FlopCounterMode(display=False) as counter:
            real(torch.randn(2, 3, 16, 16), torch.zeros(2))
    said = UNet("any", 64, 16, (1, 2), 1, (1,))
    assert axonn.model_flops(said, 2, recompute=False) == pytest.approx(3 * counter.get_total_flops(), rel=1e-9)


def test_grids_and_memory():
    trained = model.load("unet-1b")
    at = axonn.grids(trained, 256, 2048)
    assert (4 % at.gx == 0).all() and (512 % at.gy == 0).all() and (2048 % (at.gz * at.gdata) == 0).all()
    m = np.ones(len(at))
    plain, again = (fourd.memory(trained, at, m, 2048, "roofline", Setting(one)) for one in (False, True))
    assert (again.activations < plain.activations).all()
    timed, talked = fourd.times(PERLMUTTER, trained, at, m, 2048)
    assert (timed.tensor <= (talked.total - talked.data) * (1 + 1e-12)).all() and (timed.compute > 0).all()
    held = fourd.memory(trained, one(4, 2, 4, 8), np.ones(1), 2048)
    assert held.gradients[0] == 2 * trained.parameters / 32


@pytest.mark.parametrize("more", ["", "--mode paper", "--recompute --explain", "--samo 0.9 --collectives pccl"])
def test_the_command(more, capsys):
    asked = f"plan --model unet-1b --machine perlmutter --gpus 256 --batch 2048 --strategy axonn --top 3 {more}"
    assert cli.main(asked.split()) == 0
    out = capsys.readouterr().out
    assert "U-Net of 512 channels" in out and "best: axonn gx=" in out
    assert cli.main(f"{asked} --json -".split()) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert best["gx"] * best["gy"] * best["gz"] * best["gdata"] == 256


MORE = {
    "--mode paper": "best: axonn gx=",
    "--interleave 2": "--interleave = 2, but stages of 4D grids run 1F1B",
    "--ted experts=4": "--ted experts=4 is TED's",
    "--whole": "--whole is modelled for 1d",
    "--attention plain": "--attention plain is modelled for 1d",
}


@pytest.mark.parametrize("more", MORE)
def test_without_a_strategy(more, capsys):
    cli.main(f"plan --model unet-1b --machine perlmutter --gpus 256 --batch 2048 {more}".split())
    assert MORE[more] in "".join(capsys.readouterr())


def test_own_sizes(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text("channels = 64\nimage = 16\nmultipliers = [1, 2]\nattention_levels = [1]\nblocks = 1\nheads = 2\n")
    mine = model.load(str(file))
    assert mine == UNet("mine", 64, 16, (1, 2), 1, (1,), 2)
    for text, words in [
        ("channels = 64\nimage = 17", "image = 17 cannot be halved"),
        ("channels = 66", "heads = 4 does not divide channels = 66"),
        ("channels = 64\nattention_levels = [4]", "names level 4"),
        ("channels = 64\nmultipliers = []", "is not a short list"),
        ("channels = 64\nmultipliers = [1.5]", "is not a whole number"),
        ("channels = 64\nlayers = 3", 'unknown key "layers"'),
    ]:
        file.write_text(text)
        assert cli.main(f"plan --model {file} --machine a100 --gpus 8 --batch 8".split()) == 2
        assert words in capsys.readouterr().err
