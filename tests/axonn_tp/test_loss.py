"""Cross-entropy over split classes equals torch's, whatever the options, the shape and the axes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from axonn_plugins.observe.ledger import Ledger
from axonn_tp import CrossEntropyLoss, Grid, Mesh
from axonn_tp.compiled import layers as compiled
from axonn_tp.grid.share import share_of
from axonn_tp.layers.cross_entropy import check_loss, loss_collectives
from tests.distributed import run_ranks
from tests.matrix import thorough

CLASSES = 9
SHAPES = ((7,), (3, 2, 4), ())


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape and got.dtype == expected.dtype
    return (got - expected).abs().max().item()


def one_case(
    mesh: Mesh, axes: tuple[str, ...], rows: tuple[int, ...], weighted: bool, smoothing: float, reduction: str
) -> float:
    weight = torch.rand(CLASSES, dtype=torch.float64) if weighted else None
    serial = nn.CrossEntropyLoss(weight, ignore_index=4, label_smoothing=smoothing, reduction=reduction)
    ours = nn.CrossEntropyLoss(weight, ignore_index=4, label_smoothing=smoothing, reduction=reduction)
    CrossEntropyLoss.convert(ours, mesh, axes, CLASSES)
    dim = min(1, len(rows))
    logits = torch.randn(*rows[:dim], CLASSES, *rows[dim:], dtype=torch.float64).mul(3).requires_grad_()
    targets = torch.randint(CLASSES, rows)
    if rows:
        targets.view(-1)[::3] = 4
    share = share_of(mesh.grid, mesh.coordinates, axes)
    padding = [0, 0] * (len(rows) - dim) + [0, -CLASSES % share.count]

    def mine(tensor: torch.Tensor, fill: float) -> torch.Tensor:
        return F.pad(tensor.detach(), padding, value=fill).chunk(share.count, dim)[share.index].clone()

    split = mine(logits, float("-inf")).requires_grad_()
    expected = serial(logits, targets)
    outward = torch.randn_like(expected)
    (expected * outward).sum().backward()
    with Ledger(mesh.axis_names()) as ledger:
        got = ours(split, targets)
        (got * outward).sum().backward()
    assert ledger.collectives == loss_collectives(max(targets.numel(), 1), mesh.grid, axes, smoothing)
    return max(error(got, expected), error(split.grad, mine(logits.grad, 0.0)))


def all_cases(turns: int) -> dict[tuple, float]:
    """Every combination of options on all axes of both grids, or, where there are turns, a part of them on each."""
    found = {}
    places = itertools.product((Mesh.create(2, 2), Mesh.create(1, 4)), (("x",), ("y",), ("x", "y"), ("y", "x")))
    for place, (mesh, axes) in enumerate(places):
        options = itertools.product(SHAPES, (False, True), (0.0, 0.3), ("mean", "sum", "none"))
        for index, case in enumerate(options):
            if (index + place) % turns == 0:
                torch.manual_seed(index)
                found[(str(mesh.grid), axes, *case)] = one_case(mesh, axes, *case)
    refuses()
    of_whole_logits()
    return found


def of_whole_logits() -> None:
    """Of a classifier that is no head of the plan, with as many classes as the head or fewer."""
    for kind, classes in itertools.product((CrossEntropyLoss, compiled.CrossEntropyLoss), (CLASSES, 4)):
        loss = nn.CrossEntropyLoss()
        kind.convert(loss, Mesh.create(2, 2), ("x", "y"), CLASSES)
        logits, targets = torch.randn(7, classes, dtype=torch.float64), torch.randint(classes, (7,))
        assert error(loss(logits, targets), F.cross_entropy(logits, targets)) < 1e-12


def refuses() -> None:
    loss = nn.CrossEntropyLoss()
    CrossEntropyLoss.convert(loss, Mesh.create(2, 2), ("x",), CLASSES)
    logits = torch.randn(3, 5)
    with pytest.raises(ValueError, match="float32 probabilities"):
        loss(logits, torch.rand(3, 5))
    with pytest.raises(ValueError, match="hold classes in dim 1"):
        loss(logits, torch.zeros(3, 5, dtype=torch.long))
    with pytest.raises(RuntimeError, match="one of the 9 classes"):
        loss(logits, torch.tensor([0, 9, 1]))


@pytest.mark.parametrize("turns", [5, thorough(1)])
def test_every_option_on_every_axis(turns: int) -> None:
    for found in run_ranks(all_cases, 4, turns):
        assert max(found.values()) < 1e-10, max(found, key=lambda case: found[case])


def test_a_smoothed_loss_behind_heads_of_two_sizes() -> None:
    with pytest.raises(ValueError, match="head layers have 10 and 12"):
        check_loss(nn.CrossEntropyLoss(label_smoothing=0.1), {12, 10}, "loss")
    check_loss(nn.CrossEntropyLoss(torch.ones(12), label_smoothing=0.1), {12, 10}, "loss")


def test_shares_follow_the_order_of_the_axes() -> None:
    grid = Grid(gx=2, gy=3)
    for axes in (("x", "y"), ("y", "x")):
        shares = [share_of(grid, grid.coordinates(rank), axes) for rank in range(6)]
        assert [shares[rank].index for rank in shares[0].order] == list(range(6))
    assert share_of(grid, grid.coordinates(1), ("x", "y")).index == 3
    assert share_of(Grid(gx=2), {"x": 1, "y": 0}, ("y", "x")).group == "x"
    with pytest.raises(ValueError, match="z"):
        share_of(grid, grid.coordinates(0), ("z",))
