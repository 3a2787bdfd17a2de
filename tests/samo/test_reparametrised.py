"""A model that torch.nn.utils.prune has pruned goes on as it does there."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import samo


def network():
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    prune.l1_unstructured(model[0], "weight", 0.5)
    prune.random_unstructured(model[0], "weight", 0.3)
    prune.ln_structured(model[2], "weight", 0.4, n=2, dim=1)
    return model


def test_trains_as_with_the_reparametrisation():
    theirs, ours = network(), network()
    stock = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    known = {id(parameter) for parameter in ours.parameters()}
    optimizer = samo.Optimizer(lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9), ours)
    assert {id(parameter) for parameter in ours.parameters()} == known and not list(ours.buffers())
    assert sorted(name for name, _ in ours.named_parameters()) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    kept = {entry.name: entry.kept for entry in optimizer.entries}
    assert kept["0.weight"] == int(theirs[0].weight_mask.sum()) < 32
    for _ in range(5):
        batch = torch.randn(4, 7, dtype=torch.float64)
        losses = [model(batch).square().mean() for model in (theirs, ours)]
        assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-12)
        losses[0].backward(), losses[1].backward()
        stock.step(), optimizer.step()
        stock.zero_grad()
    theirs(batch)
    for layer in (0, 2):
        torch.testing.assert_close(ours[layer].weight, theirs[layer].weight, rtol=0, atol=1e-12)


def test_a_dense_model_is_left_alone():
    model = nn.Linear(3, 3)
    before = copy.deepcopy(model.state_dict())
    assert samo.absorb(model) == {} and all(
        torch.equal(model.state_dict()[key], value) for key, value in before.items()
    )
