"""Scores besides magnitude, against their formulas."""

import copy
import math

import pytest
import torch
from torch import nn

import samo
from samo import selection
from samo.pruning import smallest
from samo.scores import by_scores
from tests.samo.test_block_mesh import least


def network(seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()


def loss_of(model, batch):
    return model(batch).square().mean()


BATCHES = [torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_signed_scores_are_selected_exactly(dtype, monkeypatch):
    monkeypatch.setattr(selection, "CHUNK", 50)
    torch.manual_seed(1)
    values = torch.tensor([0.0, -0.0, -1e-45, 1e-45, -math.inf, math.inf, -2.0, 2.0, -3e38]).repeat(9).view(9, 9)
    scores = {"a": torch.randn(31, 17).to(dtype), "b": values.to(dtype), "c": -torch.rand(12, 12).to(dtype)}
    parameters = {name: torch.ones_like(score) for name, score in scores.items()}
    for sparsity in (0.1, 0.5, 0.9, 0.97):
        found = smallest(selection.Magnitudes(parameters, None, scores), sparsity, "layer")
        for name, mask in least(scores, sparsity).items():
            assert torch.equal(found[name], mask), (name, sparsity)
    everything = torch.cat([score.reshape(-1) for score in scores.values()])
    found = smallest(selection.Magnitudes(parameters, None, scores), 0.6, "global")
    assert torch.equal(torch.cat([mask.reshape(-1) for mask in found.values()]), least({"all": everything}, 0.6)["all"])


def test_random_is_by_seed_and_nested():
    model = network()
    some, more = samo.random(model, 0.5, seed=7), samo.random(model, 0.8, seed=7)
    for name, mask in more.items():
        assert bool((some[name] | ~mask).all())
        assert int((~mask).sum()) == round(0.8 * mask.numel())
        assert not torch.equal(mask, samo.random(model, 0.8, seed=8)[name])
    one, other = (samo.random([("w", torch.zeros(200, 200))], 0.5, seed=seed)["w"] for seed in (0, 1))
    assert (one == other).double().mean().item() == pytest.approx(0.5, abs=0.02)


def test_snip_is_what_one_weights_removal_changes():
    """|w · g| is the derivative of the loss by a factor at the weight."""
    model = network()
    masks = samo.snip(model, loss_of, BATCHES, 0.6)
    assert all(parameter.grad is None for parameter in model.parameters())
    changes = {}
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            changes[name] = torch.zeros(weight.shape, dtype=torch.float64)
            for at in range(weight.numel()):
                moved = []
                for factor in (1 - 1e-5, 1 + 1e-5):
                    other = copy.deepcopy(model)
                    other.get_parameter(name).data.view(-1)[at] *= factor
                    moved.append(sum(loss_of(other, batch).item() for batch in BATCHES))
                changes[name].view(-1)[at] = abs(moved[1] - moved[0])
    assert all(torch.equal(masks[name], mask) for name, mask in least(changes, 0.6).items())


def test_grasp_is_the_published_score_by_a_difference_of_gradients():
    model = network()
    masks = samo.grasp(model, loss_of, BATCHES, 0.5)

    def gradients(model):
        weights = {name: p for name, p in model.named_parameters() if p.dim() == 2}
        total = sum(loss_of(model, batch) for batch in BATCHES)
        return dict(zip(weights, torch.autograd.grad(total, list(weights.values())), strict=True))

    first = gradients(model)
    sides = []
    for step in (-1e-5, 1e-5):
        other = copy.deepcopy(model)
        for name, gradient in first.items():
            other.get_parameter(name).data.add_(gradient, alpha=step)
        sides.append(gradients(other))
    scores = {name: model.get_parameter(name).detach() * (sides[1][name] - sides[0][name]) for name in first}
    assert min(score.min().item() for score in scores.values()) < 0
    assert all(torch.equal(masks[name], mask) for name, mask in least(scores, 0.5).items())


def test_refusals():
    model = network()
    with pytest.raises(ValueError, match="there is no batch"):
        samo.snip(model, loss_of, [], 0.5)
    held = network()
    _takes = samo.Optimizer(lambda groups: torch.optim.SGD(groups, lr=0.1), held)
    with pytest.raises(ValueError, match="call it before samo.Optimizer is made"):
        samo.snip(held, loss_of, BATCHES, 0.5)
    with pytest.raises(ValueError, match="sparsity = 2"):
        samo.random(model, 2)
    parameters = {"w": torch.ones(2, 2)}
    with pytest.raises(ValueError, match="'w' holds NaN"):
        by_scores(parameters, {"w": torch.full((2, 2), math.nan)}, 0.5)
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="'0.weight' is frozen"):
        samo.grasp(model, loss_of, BATCHES, 0.5)


@pytest.mark.parametrize("pruner", ["channels", "heads"])
def test_what_is_pruned_whole_keeps_some_and_wants_numbers(pruner):
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    prune = {
        "channels": lambda sparsity: samo.channels(model, sparsity),
        "heads": lambda sparsity: samo.heads(model, sparsity, 3, ["0.weight"], ["1.weight"]),
    }[pruner]
    assert all(mask.any() for mask in prune(0.99).values())
    with pytest.raises(ValueError, match="keeps nothing"):
        prune(1.0)
    model[0].weight.data[1, 2] = torch.nan
    with pytest.raises(ValueError, match="'0.weight' holds NaN"):
        prune(0.5)


def test_heads_that_share_keys_and_values_have_none_of_their_own():
    attention = nn.ModuleDict({"q": nn.Linear(6, 8), "k": nn.Linear(6, 4), "o": nn.Linear(8, 6)})
    model = nn.ModuleDict({"attention": attention})
    assert samo.heads(model, 0.5, 4, ["*.q.weight"], ["*.o.weight"]).keys() == {
        "attention.q.weight",
        "attention.o.weight",
    }
    with pytest.raises(
        ValueError, match="'attention.k.weight' has 1 features for each of 4 heads, and 'attention.o.weight' has 2"
    ):
        samo.heads(model, 0.5, 4, ["*.q.weight", "*.k.weight"], ["*.o.weight"])
