"""RMSNorm and GroupNorm over split features equal torch's: values, gradients and what goes over the wire."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from axonn_plugins.observe.ledger import Ledger
from axonn_tp import Grid, LayerPlan, Mesh, place
from axonn_tp.grid.share import Share, share_of
from axonn_tp.layers.group_norm import GroupNorm, check_group_norm, group_norm_collectives
from axonn_tp.layers.rms_norm import RMSNorm, check_rms_norm, is_rms_norm, rms_norm_collectives
from tests.axonn_tp.test_grids import train_one_step
from tests.distributed import run_ranks


class LlamaRMSNorm(nn.Module):
    """As model libraries write it."""

    def __init__(self, features: int, eps: float = 1e-6, power: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.variance_epsilon, self.power = eps, power

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        dtype, hidden = hidden.dtype, hidden if hidden.dtype == torch.float64 else hidden.float()
        hidden = hidden * torch.rsqrt(hidden.pow(self.power).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * hidden.to(dtype)


def compare(serial: nn.Module, ours: nn.Module, mesh: Mesh, share: Share, dim: int, input: torch.Tensor) -> tuple:
    """Largest relative error of output and gradients, and the collectives of the pass."""

    def mine(tensor: torch.Tensor, dim: int = dim) -> torch.Tensor:
        return tensor.detach().chunk(share.count, dim)[share.index].clone()

    outward = torch.randn_like(input)
    whole, split = input.clone().requires_grad_(), mine(input).requires_grad_()
    expected = serial(whole)
    (expected * outward).sum().backward()
    with Ledger(mesh.axis_names()) as ledger:
        got = ours(split)
        (got * mine(outward)).sum().backward()
    assert got.dtype == expected.dtype and split.grad.dtype == whole.grad.dtype
    pairs = [(got, mine(expected)), (split.grad, mine(whole.grad))]
    pairs += [(q.grad, mine(p.grad, 0)) for p, q in zip(serial.parameters(), ours.parameters(), strict=True)]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs), ledger.collectives


def rms_norms() -> list:
    mesh, found = Mesh.create(2, 2), []
    share = share_of(mesh.grid, mesh.coordinates, ("y",))
    for dtype in (torch.float64, torch.bfloat16):
        for module in (nn.RMSNorm(12), nn.RMSNorm(12, 1e-3, elementwise_affine=False), LlamaRMSNorm(12)):
            torch.manual_seed(1)
            serial = module.to(dtype)
            for parameter in serial.parameters():
                nn.init.normal_(parameter)
            ours = copy.deepcopy(serial)
            RMSNorm.convert(ours, mesh)
            assert isinstance(ours, type(module)) and "12" in repr(ours)
            error, collectives = compare(serial, ours, mesh, share, -1, torch.randn(3, 5, 12, dtype=dtype) * 1e-2)
            assert collectives == rms_norm_collectives(15, mesh.grid)
            found.append((str(dtype), error))
    return found


def group_norms() -> list:
    found = []
    for mesh in (Mesh.create(2, 2), Mesh.create(1, 2, 2), Mesh.create(4)):
        for axes in (("x",), ("y",), ("x", "y"), ("y", "x")):
            share = share_of(mesh.grid, mesh.coordinates, axes)
            for groups in (1, 2, 3, 4, 6, 12):
                torch.manual_seed(groups)
                serial = nn.GroupNorm(groups, 12, affine=groups != 6, dtype=torch.float64)
                for parameter in serial.parameters():
                    nn.init.normal_(parameter)
                ours = copy.deepcopy(serial)
                GroupNorm.convert(ours, mesh, axes)
                shape = (2, 12) if groups == 3 else (2, 12, 3, 2)
                input = torch.randn(shape, dtype=torch.float64) + 1e3
                error, collectives = compare(serial, ours, mesh, share, 1, input)
                assert collectives == group_norm_collectives(2, 12, groups, mesh.grid, axes)
                found.append((f"{mesh.grid} {axes} {groups}", error))
    return found


def both() -> tuple[list, list]:
    return rms_norms(), group_norms()


def test_equal_to_serial() -> None:
    for rms, group in run_ranks(both, 4):
        for case, error in rms:
            assert error < (1e-10 if case == "torch.float64" else 0.02), case
        for case, error in group:
            assert error < 1e-10, case


def test_whole_groups_communicate_nothing() -> None:
    grid = Grid(gx=4, gy=2)
    assert group_norm_collectives(3, 64, 32, grid, ("x", "y")) == []
    (forward, backward) = group_norm_collectives(3, 64, 4, grid, ("x", "y"))
    assert forward == backward and (forward.axis, forward.size, forward.elements) == ("model", 8, 2 * 3)


def test_what_counts_as_an_rms_norm() -> None:
    with torch.device("meta"):
        assert is_rms_norm(LlamaRMSNorm(8))
    assert is_rms_norm(nn.RMSNorm(8)) and not is_rms_norm(nn.RMSNorm((2, 8)))
    assert not is_rms_norm(nn.LayerNorm(8)) and not is_rms_norm(LlamaRMSNorm(8, power=4))


def test_sizes_the_grid_cannot_split() -> None:
    with pytest.raises(ValueError, match="layer a: 12 features do not divide by gy = 5"):
        check_rms_norm(nn.RMSNorm(12), Grid(gy=5), "a")
    with pytest.raises(ValueError, match="layer a: a LayerNorm does not compute an RMSNorm"):
        check_rms_norm(nn.LayerNorm(12), Grid(), "a")
    with pytest.raises(ValueError, match="12 channels do not divide by gx \\* gy = 8"):
        check_group_norm(nn.GroupNorm(3, 12), Grid(gx=4, gy=2), ("x", "y"), "a")


class GatedBlocks(nn.Module):
    """A residual stream behind RMSNorms of both kinds, with gated MLPs and a smoothed loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30, 16)
        self.norms = nn.ModuleList([nn.RMSNorm(16), LlamaRMSNorm(16)])
        self.gate, self.up = (nn.ModuleList(nn.Linear(16, 24, bias=False) for _ in range(2)) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(24, 16, bias=False) for _ in range(2))
        self.head = nn.Linear(16, 30)
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=3)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for norm, gate, up, down in zip(self.norms, self.gate, self.up, self.down, strict=True):
            normal = norm(x)
            x = x + down(nn.functional.silu(gate(normal)) * up(normal))
        return self.loss(self.head(x).flatten(0, 1), targets.flatten())


PLAN = {
    "tokens": LayerPlan("embedding"),
    "norms.*": LayerPlan("norm"),
    "gate.*": LayerPlan("normal"),
    "up.*": LayerPlan("normal"),
    "down.*": LayerPlan("transposed"),
    "head": LayerPlan("head"),
    "loss": LayerPlan("loss"),
}


def a_gated_model() -> list:
    # Every rank's share of the batch has as many targets that count, so that the mean of means is the mean.
    ids = torch.arange(40).view(8, 5) * 7 % 30
    targets = (ids + 4).masked_fill(torch.arange(5) == 2, 3) % 30
    targets = targets.where((targets != 3) | (torch.arange(5) == 2), torch.tensor(5))
    return [
        (str(grid), train_one_step(GatedBlocks, PLAN, lambda model, *pair: model(*pair), (ids, targets), Mesh(grid)))
        for grid in (Grid(2, 2), Grid(1, 2, 2), Grid(1, 4), Grid(4))
    ]


def test_a_plan_with_rms_norms_gated_layers_and_a_smoothed_loss() -> None:
    for found in run_ranks(a_gated_model, 4):
        for grid, errors in found:
            assert max(errors.values()) < 1e-10, (grid, errors)


def test_a_group_norm_needs_a_normal_layer_before_it() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.GroupNorm(2, 8))
    with pytest.raises(ValueError, match="group_norm needs channels split over x"):
        place(model, Grid(), {"1": LayerPlan("group_norm")})
