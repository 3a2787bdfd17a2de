import io
import math

import pytest
import torch
from torch import nn

import samo


def drift(model, steps, size, seed=0):
    """Weights that change less and less."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(size * 0.5**step * torch.randn(parameter.shape, generator=generator))
        yield step


def model():
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(31, 17), nn.GELU(), nn.Linear(17, 9))


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_the_search_by_hand(scope):
    net = model()
    search = samo.EarlyBird(net, 0.6, window=3, epsilon=0.06, scope=scope, exclude=["*.bias"])
    masks, expected, found_at = [], [], None
    for step in drift(net, 12, 0.5):
        now = torch.cat([mask.reshape(-1) for mask in samo.magnitude(net, 0.6, scope).values()])
        expected.append([float((now != before).double().mean()) for before in masks[-3:]])
        masks.append(now)
        if search.observe():
            found_at = step
            break
        assert search.masks is None
    assert search.distances == expected
    first = next(step for step, row in enumerate(expected) if len(row) == 3 and max(row) < 0.06)
    assert found_at == first and 3 < found_at < 11
    assert torch.equal(torch.cat([mask.reshape(-1) for mask in search.masks.values()]), masks[-1])
    assert search.observe() and len(search.distances) == len(expected)


def test_not_before_the_window_is_full():
    net = model()
    search = samo.EarlyBird(net, 0.9, window=5)
    assert [search.observe() for _ in range(6)] == [False] * 5 + [True]
    assert search.distances == [[0.0] * n for n in range(6)]


@pytest.mark.parametrize("restart", [0, 2, 5, 20])
def test_a_search_survives_a_restart(restart):
    whole, net = samo.EarlyBird(first := model(), 0.6, window=3, epsilon=0.06), model()
    search = samo.EarlyBird(net, 0.6, window=3, epsilon=0.06)
    for step, _ in zip(drift(first, 12, 0.5), drift(net, 12, 0.5), strict=True):
        if step == restart:
            search = _restarted(search, net)
        assert whole.observe() == search.observe()
    search = _restarted(search, net)
    assert search.distances == whole.distances
    for name, mask in whole.masks.items():
        assert torch.equal(search.masks[name], mask)


def _restarted(search, net):
    buffer = io.BytesIO()
    torch.save(search.state_dict(), buffer)
    buffer.seek(0)
    fresh = samo.EarlyBird(net, 0.6, window=3, epsilon=0.06)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    return fresh


def test_saved_masks_take_a_bit_an_element():
    net = nn.Linear(64, 64)
    search = samo.EarlyBird(net, 0.5, window=2)
    search.observe()
    search.observe()
    recent = search.state_dict()["recent"]
    assert [mask.nbytes for masks in recent for mask in masks.values()] == [64 * 64 // 8] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "window = 0 is not a number of observations"),
        ({"window": 2.5}, "window = 2.5 is not"),
        ({"epsilon": 0}, "epsilon = 0 is not a distance"),
        ({"epsilon": math.nan}, "epsilon = nan is not"),
        ({"sparsity": -0.1}, "sparsity = -0.1 is not a share"),
        ({"scope": "block"}, "scope = 'block' is not a scope"),
        ({"include": ["3.weight"]}, "include pattern '3.weight' matches no parameter"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        samo.EarlyBird(model(), **{"sparsity": 0.5, **arguments})


def test_states_of_other_searches_are_refused():
    search = samo.EarlyBird(model(), 0.5)
    search.observe()
    for other, message in [
        (samo.EarlyBird(model(), 0.6), "sparsity = 0.5, this one for 0.6"),
        (samo.EarlyBird(model(), 0.5, exclude=["0.*"]), "has \\(17, 31\\) for '0.weight', this one no mask"),
        (samo.EarlyBird(nn.Linear(3, 4), 0.5), "for '0.weight', this one no mask"),
    ]:
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(search.state_dict())


def test_the_ticket_prunes_the_optimizer():
    net = model()
    optimizer = samo.Optimizer(lambda groups: torch.optim.AdamW(groups, lr=1e-3), net)
    search = samo.EarlyBird(net, 0.9, window=2)
    data = torch.randn(8, 31)
    while not search.observe():
        net(data).square().mean().backward()
        optimizer.step()
    optimizer.prune(search.masks)
    net(data).square().mean().backward()
    optimizer.step()
    assert sum(int((net[n].weight == 0).sum()) for n in (0, 2)) == round(0.9 * (31 * 17 + 17 * 9))
