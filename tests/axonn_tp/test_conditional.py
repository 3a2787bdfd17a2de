"""Layers that are called for some inputs only: ranks of z, which read different data, would gather parts of each other's weights."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import axonn_tp
from axonn_tp import Grid, auto_plan, layout_of
from axonn_tp.comm.at_times import are_marked
from tests.distributed import meshes, run_ranks

GRIDS = (Grid(gz=4), Grid(gx=2, gz=2), Grid(gy=2, gz=2), Grid(gz=2, gdata=2), Grid(gx=2, gy=2))


class Listed(nn.Module):
    """A mixture whose experts are called where they have tokens."""

    def __init__(self, dropped: bool = False) -> None:
        super().__init__()
        self.dropped = dropped
        self.first, self.last = nn.Linear(12, 16), nn.Linear(16, 12)
        self.gate = nn.Linear(12, 8, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 12)) for _ in range(1 if dropped else 8)
        )
        self.called: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.last(torch.tanh(self.first(x)))).flatten(0, -2)
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        mixed = x
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if self.dropped:
                if not self.training or torch.rand(()) > 0.5:
                    mixed = mixed + expert(mixed)
            elif len(rows):
                self.called.append(number)
                mixed = mixed.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return mixed.square().mean()


def differences() -> dict[str, tuple[list[int], float]]:
    """By grid the experts that this rank called, and the largest difference of the loss and the gradients."""
    found = {}
    for mesh in meshes(GRIDS):
        torch.manual_seed(1)
        serial, x = Listed().double(), torch.randn(8, 3, 12, dtype=torch.float64)
        model = axonn_tp.parallelize(copy.deepcopy(serial), mesh, "auto", example_inputs=(x,))
        copied = copy.deepcopy(model)
        copied.experts[0].load_state_dict(model.experts[0].state_dict(), assign=True)
        for each in (model, copied):  # by which a reducer tells when its sums may begin
            assert [are_marked([p]) for p in each.parameters()] == [
                "experts" in name and mesh.size("z") > 1 for name, _ in each.named_parameters()
            ]
        expected, loss = serial(x), model(mesh.shard_batch(x))
        expected.backward()
        loss.backward()
        axonn_tp.sync_gradients(model.parameters(), mesh)
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mesh.group("batch"))
        far = [mean / mesh.grid.batch - expected.detach()]
        for (_, part), (_, whole) in zip(model.named_parameters(), serial.named_parameters(), strict=True):
            assert (part.grad is None) == (whole.grad is None)
            if whole.grad is not None:
                mine = layout_of(part).shard(whole.grad, mesh.grid, mesh.coordinates).view_as(part)
                far.append((part.grad - mine).norm())
        found[str(mesh.grid)] = model.called, max(abs(one.item()) for one in far)
    return found


def test_listed_experts_equal_the_serial_model() -> None:
    ranks = run_ranks(differences, 4)
    for grid in map(str, GRIDS):
        assert max(found[grid][1] for found in ranks) < 1e-10
    assert len({tuple(found[str(GRIDS[0])][0]) for found in ranks}) > 1, "all ranks called the same experts"


@pytest.mark.parametrize("dropped", [False, True])
def test_they_are_whole_and_the_report_says_why(dropped: bool) -> None:
    """Listed experts, and a layer that is dropped now and then in training."""
    model = Listed(dropped)
    plan, report = auto_plan(model, Grid(gx=2, gz=2), (torch.randn(2, 5, 12),))
    inside = {name for name, module in model.named_modules() if "experts." in name and isinstance(module, nn.Linear)}
    assert {name for name, layer in plan.items() if layer.kind == "replicated"} == inside
    assert plan["first"].kind == "normal" and plan["last"].kind == "transposed"
    assert {row.pattern for row in report.rows if row.why == "called for some inputs only"} == {
        "experts.*.0",
        "experts.*.2",
    }
    assert "leave experts to TED" in str(report)
    alone, _ = auto_plan(model, Grid(gx=2), (torch.randn(2, 5, 12),))
    assert not {name for name, layer in alone.items() if layer.kind == "replicated"}
