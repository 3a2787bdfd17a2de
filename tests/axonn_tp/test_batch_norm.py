"""BatchNorm over z and data: a rank's own statistics as under DDP, or those of all samples on a key."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from axonn_tp import Grid, Mesh, Options, auto_plan, full_state_dict, parallelize, place, sync_gradients
from tests.distributed import run_ranks


class Net(nn.Module):
    """Convolutions, a pair of linears, and BatchNorm of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm2 = nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5, momentum=None)
        self.lift, self.norm3 = nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2, affine=False)
        self.fc1, self.norm1, self.fc2 = nn.Linear(2 * 5 * 16, 12), nn.BatchNorm1d(12, eps=1e-2), nn.Linear(12, 7)
        self.last = nn.BatchNorm1d(7, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm2(self.conv(x)).relu()
        x = self.norm3(self.lift(x[:, None])).flatten(1)
        return self.last(self.fc2(self.norm1(self.fc1(x)).tanh()))


PLAN = {"fc1": "self_contained", "fc2": "self_contained"}


def _train(model: nn.Module, batches: list[Tensor], mesh: Mesh | None) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for batch in batches:
        optimizer.zero_grad()
        model(batch if mesh is None else mesh.shard_batch(batch)).square().sin().mean().backward()
        if mesh is not None:
            sync_gradients(model.parameters(), mesh)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        answer = model(batches[0])
    return {**(model.state_dict() if mesh is None else full_state_dict(model, mesh)), "answer": answer}


def on_grids(grids: list[dict[str, int]]) -> list[Any]:
    torch.manual_seed(3)
    serial = Net().double()
    batches = [torch.randn(8, 3, 4, 4, dtype=torch.float64) for _ in range(3)]
    found: list[Any] = []
    for sizes in grids:
        expected = _train(copy.deepcopy(serial), batches, None)
        torchs = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(serial))
        for model, synchronised in ((serial, True), (torchs, False), (serial, False)):
            mesh = Mesh.create(**sizes)
            options = Options(sync_batch_norm=synchronised)
            got = _train(parallelize(copy.deepcopy(model), mesh, PLAN, options), batches, mesh)
            found.append(max(float((got[name] - value).abs().max()) for name, value in expected.items() if name in got))
            assert torch.distributed.get_rank() or expected.keys() <= got.keys()
    return found


def test_synchronised_statistics_are_those_of_one_rank() -> None:
    grids = [{"gz": 4}, {"gx": 2, "gz": 2}, {"gy": 2}, {}]
    for found in run_ranks(on_grids, 4, grids):
        for synchronised, torchs, own in zip(found[::3], found[1::3], found[2::3], strict=True):
            assert max(synchronised, torchs) < 1e-10
            assert own > 1e-3  # as under DDP; were it less, this test would show nothing


@pytest.mark.parametrize("synchronised", [False, True])
def test_the_report_says_whose_statistics(synchronised: bool) -> None:
    options = Options(sync_batch_norm=synchronised)
    report = str(auto_plan(Net(), Grid(1, 1, 2, 1), (torch.randn(2, 3, 4, 4),), options)[1])
    words = "statistics of all ranks' samples" if synchronised else "each rank's own samples, as under DDP"
    assert sum(words in line for line in report.splitlines()) == 4


class WithActivation(nn.BatchNorm2d):
    """As timm's are."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


class WithActivationOfAll(nn.SyncBatchNorm):
    forward = WithActivation.forward


def test_one_that_holds_an_activation_is_refused() -> None:
    """Its forward would be lost, in training alone."""
    own = nn.Sequential(nn.Conv2d(3, 4, 3), WithActivation(4))
    assert place(own, Grid(gdata=2)) and place(own, Grid(2), None, Options(sync_batch_norm=True))
    for model, options in (
        (own, Options(sync_batch_norm=True)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), WithActivationOfAll(4)), Options()),
    ):
        with pytest.raises(
            ValueError, match="layer 1: WithActivation.* has a forward of its own, which the statistics"
        ):
            place(model, Grid(gdata=2), None, options)
