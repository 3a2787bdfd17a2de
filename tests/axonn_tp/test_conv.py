"""Convolutions as 3D parallel products against torch's on every grid: values, gradients, and what goes over the wire."""

from __future__ import annotations

import copy
import itertools
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch import nn

import axonn_tp
from axonn_plugins.observe.ledger import Ledger
from axonn_tp import Grid, LinearSplit, Mesh, Options, factorisations
from axonn_tp.layers.conv import Conv, Convolution, check_conv, conv_collectives, conv_layout, is_conv
from tests.axonn_tp.test_grids import TOLERANCE, whole
from tests.distributed import meshes, run_ranks
from tests.matrix import thorough

OPTIONS = (
    {"padding": 1},
    {"stride": 2, "padding": (1, 0), "bias": False},
    {"dilation": 2, "padding": 2, "padding_mode": "reflect"},
    {"padding": "same", "padding_mode": "circular", "kernel_size": (2, 3)},
    {"padding": "same", "kernel_size": (4, 1)},
    {"padding": "valid"},
)
UPWARD = ({"stride": 2, "padding": 1, "output_padding": 1}, {"bias": False, "dilation": 2})


def layers() -> list[nn.Module]:
    """Convolutions with channels that eight ranks can split: 8 → 16."""
    made: list[nn.Module] = [nn.Conv2d(8, 16, **{"kernel_size": 3, **options}) for options in OPTIONS]
    made += [nn.ConvTranspose2d(8, 16, **{"kernel_size": 3, **options}) for options in UPWARD]
    return [*made, nn.Conv1d(8, 16, 3, padding=1), nn.Conv3d(8, 16, 2), nn.ConvTranspose1d(8, 16, 4, 2, 1)]


def image(module: nn.Module, images: int, channels: int) -> torch.Tensor:
    return torch.randn(images, channels, *(7, 6, 5)[: len(module.kernel_size)], dtype=torch.float64)


@pytest.mark.parametrize("module", layers(), ids=lambda module: str(module))
def test_the_operation_and_its_gradients_are_torchs(module: nn.Module) -> None:
    module = module.double()
    operation, input = Convolution(module), image(module, 2, 8).requires_grad_()
    expected = module(input)
    output = operation.forward(input, module.weight, module.bias)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    grad = torch.randn_like(output)
    d_input, d_weight = torch.autograd.grad(expected, (input, module.weight), grad)
    with torch.no_grad():
        torch.testing.assert_close(operation.grad_input(grad, module.weight, input.shape), d_input, rtol=0, atol=1e-12)
        got = operation.grad_weight(grad, input.detach(), module.weight.shape)
        torch.testing.assert_close(got, d_weight, rtol=0, atol=1e-12)


def share(tensor: torch.Tensor, mesh: Mesh, how: str, axes: tuple[str, str]) -> torch.Tensor:
    """This rank's images and channels of a tensor."""
    tensor = mesh.shard_batch(tensor)
    for axis in {"whole": (), "split": axes[:1], "features": axes}[how]:
        tensor = tensor.chunk(mesh.size(axis), 1)[mesh.rank(axis)]
    return tensor.detach().clone()


def one_layer(serial: nn.Module, mesh: Mesh, split: LinearSplit, options: Options) -> tuple[float, list, list]:
    """Largest error of output, gradients and weight, and the collectives of the pass, found and expected."""
    ours = copy.deepcopy(serial)
    check_conv(ours, split, mesh.grid, "conv")
    Conv.convert(ours, mesh, split, options)
    axes = (split.contracted, split.output)
    input = image(serial, 8, serial.in_channels).requires_grad_()
    expected = serial(input)
    outward = torch.randn_like(expected)
    (expected * outward).sum().backward()
    mine = share(input, mesh, split.takes, axes).requires_grad_()
    with Ledger(mesh.axis_names()) as ledger:
        output = ours(mine)
        (output * share(outward, mesh, split.gives, axes[::-1])).sum().backward()
    axonn_tp.sync_gradients(ours.parameters(), mesh, average=False)
    pairs = [
        (output, share(expected, mesh, split.gives, axes[::-1])),
        (mine.grad, share(input.grad, mesh, split.takes, axes)),
    ]
    for q, p in zip(serial.parameters(), ours.parameters(), strict=True):
        pairs += [(whole(p, p.grad, mesh), q.grad), (whole(p, p.data, mesh), q.data)]
    images = 8 // mesh.grid.batch
    positions = (images * t[0, 0].numel() for t in (input, expected))
    wanted = conv_collectives(serial, *positions, mesh.grid, split, options)
    assert all(a.shape == b.shape for a, b in pairs)
    worst = max((a - b).abs().max().item() for a, b in pairs)
    return worst, sorted(map(str, ledger.collectives)), sorted(map(str, wanted))


def on_grids(step: int) -> list:
    found = []
    for index, mesh in enumerate(meshes(list(factorisations(dist.get_world_size()))[::step])):
        torch.manual_seed(index)
        options = Options(reshard_after_forward=bool(index % 2), overlap_all_reduce=index % 3 > 0)
        ways = itertools.cycle([(False, "split"), (True, "features"), (True, "split"), (False, "features")])
        cases = [
            (layer.double(), LinearSplit(transposed=transposed, takes=takes))
            for layer, (transposed, takes) in zip(layers()[index % 2 :: 2], ways, strict=False)
        ]
        cases.append((nn.Conv2d(8, 16, 3).double(), LinearSplit(takes="whole", gives="features")))
        for odd in (nn.Conv2d(3, 5, 3, padding=1), nn.ConvTranspose2d(5, 3, 2)):
            cases.append((odd.double(), LinearSplit(takes="whole", gives="whole", pad=True)))
        for layer, split in cases:
            found.append((f"{mesh.grid} {layer} {split}", *one_layer(layer, mesh, split, options)))
    return found


@pytest.mark.parametrize(("ranks", "step"), [(4, 2), thorough(4, 1), thorough(8, 1)])
def test_grids(ranks: int, step: int) -> None:
    for found in run_ranks(on_grids, ranks, step):
        for case, worst, passes, expected in found:
            assert worst < TOLERANCE, case
            assert passes == expected, case


@pytest.mark.parametrize("transposed", [False, True])
def test_volumes_are_equations_5_1_to_5_5(transposed: bool) -> None:
    images, k, n, size = 24, 48, 144, 9
    for grid in (Grid(2, 3, 4, 2), Grid(1, 2, 3, 4), Grid(4, 1, 1, 6)):
        gx, gy, gz = grid.gx, grid.gy, grid.gz
        if transposed:
            gx, gy = gy, gx
        positions, made = images // gz * 8 * 8, images // gz * 4 * 4
        expected = {
            ("all_gather", "z"): Fraction((gz - 1) * k * n * size, gx * gy * gz),
            ("reduce_scatter", "z"): Fraction((gz - 1) * k * n * size, gz * gx * gy),
            ("all_reduce", "x" if transposed else "y"): Fraction(2 * (gy - 1) * made * n, gy * gx),
            ("all_reduce", "y" if transposed else "x"): Fraction(2 * (gx - 1) * positions * k, gx * gy),
        }
        layer = nn.Conv2d(k, n, 3, stride=2, padding=1)
        counted = conv_collectives(layer, positions, made, grid, LinearSplit(transposed=transposed))
        assert {(c.op, c.axis): c.sent for c in counted} == {key: value for key, value in expected.items() if value}


def test_layouts_follow_torchs_order_of_channels() -> None:
    split = LinearSplit()
    assert conv_layout(nn.Conv2d(8, 16, 3), split).split == ((0, "x"), (1, "y"))
    assert conv_layout(nn.ConvTranspose2d(8, 16, 3), split).split == ((1, "x"), (0, "y"))


def test_what_cannot_be_split() -> None:
    assert is_conv(nn.Conv2d(4, 4, 1)) and not is_conv(nn.Conv2d(4, 4, 1, groups=2)) and not is_conv(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="layer a: a convolution of 2 groups"):
        check_conv(nn.Conv2d(4, 4, 1, groups=2), LinearSplit(), Grid(), "a")
    with pytest.raises(ValueError, match="layer a: parts = 3"):
        check_conv(nn.ConvTranspose2d(4, 6, 1), LinearSplit(parts=3), Grid(), "a")
    with pytest.raises(ValueError, match="layer a: 6 output features do not divide by gx = 4"):
        check_conv(nn.Conv2d(4, 6, 1), LinearSplit(), Grid(gx=4), "a")
