"""The 3D-PMM linear against nn.Linear on every grid: values, gradients, and what goes over the wire."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch import nn

import axonn_tp
from axonn_plugins.observe.ledger import Ledger
from axonn_tp import Collective, Grid, Linear, LinearSplit, Mesh, factorisations, linear_collectives
from tests.axonn_tp.test_grids import TOLERANCE, WORLDS, whole
from tests.distributed import meshes, run_ranks
from tests.matrix import thorough

K, N, ROWS = 24, 40, 8


def part(tensor: torch.Tensor, mesh: Mesh, axis: str, dim: int = -1) -> torch.Tensor:
    return tensor.chunk(mesh.size(axis), dim)[mesh.rank(axis)]


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape
    return (got - expected).abs().max().item()


def one_layer(mesh: Mesh, transposed: bool, bias: bool) -> tuple[float, list, list, list]:
    """Largest error of output, gradients and weights after AdamW, and the collectives of the pass."""
    torch.manual_seed(5)
    serial = nn.Linear(K, N, bias, dtype=torch.float64)
    torch.manual_seed(5)
    ours = Linear(K, N, bias, mesh=mesh, transposed=transposed, dtype=torch.float64)
    contracted, output = ours.split.contracted, ours.split.output
    optimizers = [torch.optim.AdamW(layer.parameters(), lr=0.1) for layer in (serial, ours)]
    whole_input = torch.randn(ROWS, 3, K, dtype=torch.float64).requires_grad_()
    weight_out = torch.randn(ROWS, 3, N, dtype=torch.float64)
    (serial(whole_input) * weight_out).sum().backward()
    mine = part(mesh.shard_batch(whole_input.detach()), mesh, contracted).contiguous().requires_grad_()
    with Ledger(mesh.axis_names()) as ledger:
        result = ours(mine)
        (result * part(mesh.shard_batch(weight_out), mesh, output)).sum().backward()
    with Ledger(mesh.axis_names()) as sums:
        axonn_tp.sync_gradients(ours.parameters(), mesh, average=False)
    errors = [
        error(result, part(mesh.shard_batch(serial(whole_input)), mesh, output)),
        error(mine.grad, part(mesh.shard_batch(whole_input.grad), mesh, contracted)),
    ]
    pairs = list(zip(serial.parameters(), ours.parameters(), strict=True))
    errors += [error(whole(p, p.grad, mesh), expected.grad) for expected, p in pairs]
    for optimizer in optimizers:
        optimizer.step()
    errors += [error(whole(p, p.data, mesh), expected.data) for expected, p in pairs]
    expected_collectives = linear_collectives(3 * ROWS // mesh.grid.batch, K, N, mesh.grid, ours.split)
    return max(errors), sorted(map(str, ledger.collectives)), sorted(map(str, expected_collectives)), sums.collectives


KINDS = ((False, True), (True, True), (False, False))
"""Transposed, and with a bias."""


def layers_on_grids(turns: int) -> list:
    """Each kind of layer on each grid; on every second one, in turn, where there are two turns."""
    return [
        (mesh.grid, bias, *one_layer(mesh, transposed, bias))
        for place, mesh in enumerate(meshes(factorisations(dist.get_world_size())))
        for transposed, bias in KINDS[place % turns :: turns]
    ]


@pytest.mark.parametrize(("ranks", "turns"), [(1, 1), (2, 1), (4, 2), *map(thorough, WORLDS[2:], (1, 1))])
def test_every_grid(ranks: int, turns: int) -> None:
    for found in run_ranks(layers_on_grids, ranks, turns):
        for grid, bias, largest, passes, expected, sums in found:
            assert largest < TOLERANCE, grid
            assert passes == expected
            if not bias:
                shard = -(-K * N // (grid.gx * grid.gy * grid.gz))
                assert sums == ([Collective("all_reduce", "data", grid.gdata, shard)] if grid.gdata > 1 else [])


@pytest.mark.parametrize("transposed", [False, True])
def test_volumes_are_equations_5_1_to_5_5(transposed: bool) -> None:
    m, k, n = 96, 48, 144
    for grid in (Grid(2, 3, 4, 2), Grid(1, 2, 3, 4), Grid(4, 1, 1, 6), Grid(2, 2, 2, 1)):
        gx, gy, gz = grid.gx, grid.gy, grid.gz
        if transposed:
            gx, gy = gy, gx
        # The papers' m is the rows of one data-parallel group.
        expected = {
            ("all_gather", "z"): Fraction((gz - 1) * k * n, gx * gy * gz),
            ("reduce_scatter", "z"): Fraction((gz - 1) * k * n, gz * gx * gy),
            ("all_reduce", "x" if transposed else "y"): Fraction(2 * (gy - 1) * m * n, gy * gz * gx),
            ("all_reduce", "y" if transposed else "x"): Fraction(2 * (gx - 1) * m * k, gx * gz * gy),
        }
        counted = linear_collectives(m // grid.gz, k, n, grid, LinearSplit(transposed=transposed))
        got = {(c.op, c.axis): c.sent for c in counted}
        assert got == {key: value for key, value in expected.items() if value}


class Odd(nn.Module):
    """Sizes that nothing divides, a layer without bias, one that is frozen, and leading dims."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 13), nn.Linear(13, 5, bias=False)
        self.c, self.d = nn.Linear(5, 11), nn.Linear(11, 1)
        self.b.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(torch.tanh(self.c(torch.relu(self.b(torch.tanh(self.a(x))))))).square().mean()


def odd_on_grids(grids: list[Grid]) -> list:
    from tests.axonn_tp.test_grids import train_one_step

    batch = torch.randn(8, 2, 3, 7, dtype=torch.float64)
    return [(mesh.grid, train_one_step(Odd, {}, lambda model, x: model(x), (batch,), mesh)) for mesh in meshes(grids)]


@pytest.mark.parametrize(
    ("ranks", "every"), [(1, True), (2, True), (4, False), *map(thorough, WORLDS[2:], (True, True))]
)
def test_self_contained_layers_of_any_size(ranks: int, every: bool) -> None:
    torch.manual_seed(11)
    grids = list(factorisations(ranks))[:: 1 if every else 2]
    for found in run_ranks(odd_on_grids, ranks, grids):
        for grid, errors in found:
            assert max(errors.values()) < TOLERANCE, (grid, errors)


def low_precision() -> dict[str, float]:
    mesh = Mesh.create(2, 2, 1)
    found = {}
    for dtype, autocast in (
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.float16, True),
        (torch.bfloat16, True),
    ):
        torch.manual_seed(5)
        serial = nn.Linear(K, N, dtype=torch.float32 if autocast else dtype)
        torch.manual_seed(5)
        ours = Linear(K, N, mesh=mesh, dtype=torch.float32 if autocast else dtype)
        rows = torch.randn(ROWS, K).to(torch.float32 if autocast else dtype)
        with torch.autocast("cpu", dtype, enabled=autocast):
            expected, got = serial(rows), ours(part(rows, mesh, "y"))
        assert got.dtype == expected.dtype == dtype
        got.float().sum().backward()
        assert all(p.grad is not None and p.grad.dtype == p.dtype for p in ours.parameters())
        found[f"{dtype} {autocast}"] = error(got.float(), part(expected.float(), mesh, "x"))
    return found


def test_precisions_and_autocast() -> None:
    for found in run_ranks(low_precision, 4):
        assert found.pop("torch.float32 False") < 1e-6
        assert max(found.values()) < 2e-2


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ((24, 30), {}, "30 output features do not divide by gx = 4"),
        ((25, 32), {"transposed": True}, "25 input features do not divide by gx = 4"),
        ((24, 36), {"parts": 3, "heads": 6}, "6 heads do not divide by gx = 4"),
        ((24, 32), {"parts": 3}, "not 3 equal parts"),
        ((24, 24), {"heads": 7}, "not 7 equal heads"),
    ],
)
def test_sizes_the_grid_cannot_split(sizes: tuple[int, int], options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LinearSplit(**options).check(sizes[1], sizes[0], Grid(gx=4), "blocks.0.fc1")
