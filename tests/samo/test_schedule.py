"""Sparsity that grows, against the published formula, and state that shrinks with it."""

import pytest
import torch
from torch import nn

import samo


def test_follows_the_published_cubic_and_a_line():
    # 0.9 + (0.1 - 0.9)(1 - t/40)^3 at t = 0, 10, 20, 30, 40 after step 7.
    cubic = samo.Schedule(0.9, 7, 47, 10, 0.1)
    linear = samo.Schedule(0.9, 7, 47, 10, 0.1, "linear")
    assert [cubic.sparsity(step) for step in (7, 17, 27, 37, 47)] == pytest.approx([0.1, 0.5625, 0.8, 0.8875, 0.9])
    assert [linear.sparsity(step) for step in (7, 17, 27, 37, 47)] == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    assert cubic.sparsity(6) == 0 and cubic.sparsity(26) == cubic.sparsity(17) and cubic.sparsity(1000) == 0.9
    assert [step for step in range(60) if cubic.due(step)] == [7, 17, 27, 37, 47]
    uneven = samo.Schedule(0.9, 0, 25, 10)
    assert [step for step in range(40) if uneven.due(step)] == [0, 10, 20, 25]
    assert uneven.sparsity(25) == 0.9 > uneven.sparsity(24) == uneven.sparsity(20)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((0.5, 0, 10, 1, 0.6), "initial = 0.6"),
        ((1.5, 0, 10, 1), "sparsity = 1.5"),
        ((0.5, 10, 10, 1), "end_step = 10"),
        ((0.5, 0, 10, 0), "interval = 0"),
        ((0.5, 0, 10, 1, 0.0, "square"), "shape = 'square'"),
    ],
)
def test_refuses(given, said):
    with pytest.raises(ValueError, match=said):
        samo.Schedule(*given)


def test_masks_are_nested_and_memory_shrinks_with_each():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 8))
    optimizer = samo.Optimizer(lambda groups: torch.optim.AdamW(groups, lr=1e-2), model)
    schedule, sizes, before = samo.Schedule(0.9, 1, 7, 2), [], None
    for step in range(1, 10):
        model(torch.randn(5, 40)).square().mean().backward()
        optimizer.step()
        if schedule.due(step):
            masks = samo.magnitude(model, schedule.sparsity(step))
            optimizer.prune(masks)
            sizes.append(optimizer.nbytes)
            assert before is None or all(bool((before[name] | ~mask).all()) for name, mask in masks.items())
            before = masks
            state = optimizer.state_dict()["state"][0]
            assert state["exp_avg"].numel() == int(masks["0.weight"].sum())
    assert schedule.sparsity(1) == 0
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    assert sizes[-1] < 0.5 * sizes[0]
