"""No default prunes a matrix away, and what has been pruned away still goes back to a dense run."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import samo


def uneven() -> nn.Module:
    """A model whose first matrix is a hundred times smaller than its second, as GPT-2's attention outputs are at first."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 8), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].weight.mul_(0.01)
    return model


@pytest.mark.parametrize("sparsity", [0.5, 0.9, 0.99])
def test_the_default_keeps_every_matrix_alive(sparsity):
    model = uneven()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        masks = samo.magnitude(model, sparsity)
    for name, mask in masks.items():
        assert int(mask.sum()) == max(mask.numel() - round(sparsity * mask.numel()), 1), name
    search = samo.EarlyBird(model, sparsity, window=1)
    assert not search.observe() and search.observe()
    assert search.masks is not None and all(torch.equal(search.masks[name], mask) for name, mask in masks.items())


def test_a_global_threshold_that_takes_a_matrix_is_refused_by_name():
    search = samo.EarlyBird(uneven(), 0.9, window=1, scope="global")
    assert not search.observe()  # it may still change
    for look in (lambda: samo.magnitude(uneven(), 0.9, "global"), search.observe):
        with pytest.raises(ValueError, match=r"scope = 'global' keeps nothing of '0.weight'; use scope = 'layer'"):
            look()


def test_a_matrix_of_which_little_is_kept_is_named_in_a_warning():
    model = uneven()
    with torch.no_grad():
        model[0].weight[3, 5] = 9.0
    with pytest.warns(UserWarning, match=r"keeps less than 2.50% of '0.weight' \(0.521%\)"):
        samo.magnitude(model, 0.75, "global")


def test_a_matrix_whose_magnitudes_are_equal_is_named_in_a_warning():
    """As LoRA's second matrix, and what ends a residual block, are zero at first: which go is their order's alone."""
    model = uneven()
    nn.init.zeros_(model[1].weight)
    for scope in ("layer", "global"):
        with pytest.warns(UserWarning, match="all magnitudes are equal in '1.weight', as of a layer that begins"):
            masks = samo.magnitude(model, 0.2, scope)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        samo.random(model, 0.5)
        samo.regrow(
            {"1.weight": model[1].weight}, {"1.weight": torch.zeros(8, 16)}, {"1.weight": masks["1.weight"]}, 0.5
        )


@pytest.mark.parametrize("sparsity", [1.0, 1])
def test_all_of_it_is_refused(sparsity):
    for scope in ("layer", "global"):
        with pytest.raises(ValueError, match="keeps nothing of '0.weight', '1.weight'"):
            samo.magnitude(uneven(), sparsity, scope)


def _trained(dtype: torch.dtype, fused: bool) -> tuple[nn.Module, samo.Optimizer]:
    model = uneven().to(dtype)
    masks = {"0.weight": torch.zeros(16, 24, dtype=torch.bool), "1.weight": torch.rand(8, 16) > 0.5}
    optimizer = samo.Optimizer(lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=fused), model, masks)
    for _ in range(2):
        model(torch.randn(4, 24, dtype=dtype)).square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_matrix_pruned_whole_goes_back_to_a_dense_optimizer(dtype, fused):
    model, optimizer = _trained(dtype, fused)
    assert not model[0].weight.any()
    dense = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.release()
    dense.load_state_dict(samo.dense_state_dict(optimizer))
    state = dense.state[model[0].weight]
    assert state["step"] == 2 and state["exp_avg"].shape == (16, 24) and not state["exp_avg"].any()
    model(torch.randn(4, 24, dtype=dtype)).square().mean().backward()
    dense.step()
    assert model[0].weight.any()


def test_a_state_dict_of_torchs_prune_is_taken_as_masks(tmp_path):
    pruned, model = uneven(), uneven()
    prune.l1_unstructured(pruned[0], "weight", 0.75)
    prune.random_unstructured(pruned[1], "weight", 0.5)
    expected = {"0.weight": pruned[0].weight_mask.bool(), "1.weight": pruned[1].weight_mask.bool()}
    torch.save(pruned.state_dict(), tmp_path / "pruned.pt")
    found = samo.read_masks(tmp_path / "pruned.pt", model)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    samo.Optimizer(lambda groups: torch.optim.SGD(groups, lr=0.1), model, pruned.state_dict())
    for number in (0, 1):
        assert torch.equal(model[number].weight, pruned[number].weight)


def test_a_file_that_keeps_nothing_of_a_matrix_is_refused(tmp_path):
    samo.write_masks(tmp_path / "masks", {"0.weight": torch.zeros(16, 24, dtype=torch.bool)})
    with pytest.raises(ValueError, match="'0.weight' in .* keeps nothing"):
        samo.read_masks(tmp_path / "masks", uneven())


def test_an_optimizer_that_needs_a_closure_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="LBFGS computes the loss several times a step"):
        samo.Optimizer(torch.optim.LBFGS, uneven())
