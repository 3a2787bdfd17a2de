"""The search for a plan takes a model that cannot be run as it is, and lets out what our own code gets wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from axonn_tp import Grid, auto_plan
from axonn_tp.plan.search.shadow import Shadow


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x).relu())


class Stubborn(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.missing)


@pytest.mark.parametrize("place", [(Shadow, "share"), (Shadow, "whole")])
def test_a_fault_of_ours_comes_out_when_asked_for(place: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = place
    source = compile("def broken(*inputs): return None.part", owner.__init__.__code__.co_filename, "exec")
    found: dict = {}
    exec(source, found)
    monkeypatch.setattr(owner, name, found["broken"])
    example = (torch.randn(2, 8),)
    with pytest.raises(AttributeError, match="part"):
        auto_plan(Net(), Grid(2, 1, 1, 1), example)
    monkeypatch.setenv("AXONN_DEBUG", "0")
    assert "NoneType" in str(auto_plan(Net(), Grid(2, 1, 1, 1), example)[1])


def test_a_fault_of_the_models_is_a_note() -> None:
    plan, report = auto_plan(Stubborn(), Grid(2, 1, 1, 1), (torch.randn(2, 8),))
    assert not plan and "missing" in str(report)
