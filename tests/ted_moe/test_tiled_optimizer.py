"""The tiled optimizer beside the same optimizer on masters whose gradients are upcast whole."""

import copy
import itertools
from functools import partial

import pytest
import torch
from torch import nn

from axonn_recipes.allocations import most_allocated
from ted_moe import TiledOptimizer

FACTORIES = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "adam": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "maximizing": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1, maximize=True),
    "foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "sgd": partial(torch.optim.SGD, lr=1e-2),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.5, centered=True),
    "adadelta": partial(torch.optim.Adadelta, lr=1e-2),
    "nadam": partial(torch.optim.NAdam, lr=1e-2),
    "adamax": partial(torch.optim.Adamax, lr=1e-2),
}


class Model(nn.Module):
    """Odd sizes, a scalar, an unused layer and one in channels-last."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 11, 3).to(memory_format=torch.channels_last)
        self.layers = nn.Sequential(nn.Linear(11, 67), nn.GELU(), nn.Linear(67, 41), nn.LayerNorm(41), nn.Linear(41, 5))
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Linear(3, 5)

    def forward(self, images):
        return self.layers(self.conv(images).flatten(2).mean(2)).float().mul(self.scale).square().mean()


class Untiled:
    """Masters, whole float32 gradients, torch's clipping and the optimizer."""

    def __init__(self, factory, groups, max_norm=None):
        self.pairs, self.max_norm, self.norm = [], max_norm, None
        given = []
        for group in groups:
            masters = [p.detach().float().requires_grad_() if low(p) else p for p in group["params"]]
            self.pairs += list(zip(group["params"], masters, strict=True))
            given.append({**group, "params": masters})
        self.optimizer = factory(given)

    @torch.no_grad()
    def step(self, scale=1.0):
        for parameter, master in self.pairs:
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype) / scale
        if self.max_norm is not None:
            self.norm = nn.utils.clip_grad_norm_([master for _, master in self.pairs], self.max_norm)
        self.optimizer.step()
        for parameter, master in self.pairs:
            if parameter is not master:
                parameter.copy_(master)


def low(parameter):
    return parameter.dtype in (torch.bfloat16, torch.float16)


def groups_of(model):
    """Matrices and the rest, as a mixture's dense and expert parameters would be."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "lr": 2e-2}, {"params": rest, "weight_decay": 0.0}]


def pair(dtype, seed=0):
    torch.manual_seed(seed)
    model = Model().to(dtype)
    return model, copy.deepcopy(model)


def train(model, step, steps=5, scale=lambda loss: loss, seed=3):
    generator = torch.Generator().manual_seed(seed)
    losses = []
    dtype = model.scale.dtype
    for _ in range(steps):
        model.zero_grad()
        for _ in range(2):
            loss = model(torch.randn(4, 3, 5, 5, generator=generator).to(dtype))
            scale(loss).backward()
            losses.append(loss.item())
        step()
    return losses


def assert_same(reference, optimizer):
    mine = [(optimizer._live[master], master) for group in optimizer.inner.param_groups for master in group["params"]]
    for ours_and_master, theirs in zip(mine, reference.pairs, strict=True):
        for tensor, expected in zip(ours_and_master, theirs, strict=True):
            assert torch.equal(tensor, expected), tensor.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FACTORIES)
def test_the_bits_of_untiled(name, dtype):
    for tile_size in (64, 1000, 10**6) if name == "adamw" else (300,):
        ours, other = pair(dtype)
        optimizer = TiledOptimizer(FACTORIES[name], groups_of(ours), tile_size)
        reference = Untiled(FACTORIES[name], groups_of(other))
        assert train(ours, optimizer.step) == train(other, reference.step)
        assert_same(reference, optimizer)


def test_fused_kernels_agree_to_rounding():
    fused = partial(torch.optim.AdamW, lr=1e-2, fused=True)
    ours, other = pair(torch.bfloat16)
    mine = train(ours, TiledOptimizer(fused, groups_of(ours), 100).step)
    assert mine == pytest.approx(train(other, Untiled(fused, groups_of(other)).step), rel=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_clipping(dtype):
    for tile_size, exact in ((3000, True), (100, False)):
        ours, other = pair(dtype)
        groups = [{"params": []}, *groups_of(ours)]  # as where a stage has none of a group
        optimizer = TiledOptimizer(FACTORIES["adamw"], groups, tile_size, max_norm=0.05)
        reference = Untiled(FACTORIES["adamw"], groups_of(other), max_norm=0.05)
        mine, theirs = train(ours, optimizer.step), train(other, reference.step)
        assert optimizer.total_norm.item() > 0.05
        assert optimizer.total_norm.item() == pytest.approx(reference.norm.item(), rel=1e-6 if exact else 0.05)
        assert mine == theirs if exact else mine == pytest.approx(theirs, rel=2e-2)


def test_norm_over_groups():
    """A function makes the norm of the whole from the parameters' squares, by name."""
    ours, _ = pair(torch.bfloat16)
    seen = {}

    def of_two_ranks(squares):
        seen.update(squares)
        return 2 * sum(squares.values())

    optimizer = TiledOptimizer(FACTORIES["adamw"], ours.named_parameters(), 100, max_norm=1.0, norm=of_two_ranks)
    train(ours, optimizer.step, steps=1)
    gradients = {name: p.grad.double() for name, p in ours.named_parameters() if p.grad is not None}
    assert seen.keys() == gradients.keys()
    exact = (2 * sum(g.square().sum() for g in gradients.values())).sqrt()
    assert optimizer.total_norm.item() == pytest.approx(exact.item(), rel=1e-6)


@pytest.mark.parametrize(("start", "fixed"), [(128.0, 128.0), (2.0**18, None)])
def test_loss_scaling(start, fixed):
    """A GradScaler, static and dynamic: overflows are skipped, the rest is what unscaled masters would do."""
    ours, other = pair(torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=2)
    optimizer = TiledOptimizer(FACTORIES["adamw"], groups_of(ours), 3000, max_norm=0.5)
    reference = Untiled(FACTORIES["adamw"], groups_of(other), max_norm=0.5)
    scales, skipped = [], []

    def step():
        scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update(fixed)
        skipped.append(optimizer.overflow)

    mine = train(ours, step, 12, scaler.scale)
    assert any(skipped) == (fixed is None) and not all(skipped)
    microbatches, steps = itertools.count(), itertools.count()

    def reference_step():
        number = next(steps)
        if not skipped[number]:
            reference.step(scales[number])

    assert mine == train(other, reference_step, 12, lambda loss: loss * scales[next(microbatches) // 2])
    assert_same(reference, optimizer)


def test_state_dicts_of_tiled_and_untiled():
    ours, other = pair(torch.bfloat16)
    optimizer = TiledOptimizer(FACTORIES["adamw"], groups_of(ours), 300)
    reference = Untiled(FACTORIES["adamw"], groups_of(other))
    train(ours, optimizer.step), train(other, reference.step)
    mine, theirs = optimizer.state_dict(), reference.optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"] and mine["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert mine["state"][number].keys() == state.keys()
        assert all(torch.equal(mine["state"][number][key], value) for key, value in state.items())
    assert all(torch.equal(m, mine["masters"][n]) for n, (_, m) in enumerate(reference.pairs))

    again, plain = pair(torch.bfloat16, seed=1)
    again.load_state_dict(ours.state_dict()), plain.load_state_dict(other.state_dict())
    resumed = TiledOptimizer(FACTORIES["adamw"], groups_of(again), 100)
    resumed.load_state_dict(copy.deepcopy(mine))
    untiled = Untiled(FACTORIES["adamw"], groups_of(plain))
    untiled.optimizer.load_state_dict(copy.deepcopy(mine))
    for (_, master), (_, saved) in zip(untiled.pairs, reference.pairs, strict=True):
        master.data.copy_(saved)
    expected = train(ours, optimizer.step, seed=4)
    assert train(again, resumed.step, seed=4) == expected
    assert train(plain, untiled.step, seed=4) == expected

    third, _ = pair(torch.bfloat16, seed=2)
    third.load_state_dict(other.state_dict())
    without = TiledOptimizer(FACTORIES["adamw"], groups_of(third), 100)
    without.load_state_dict(reference.optimizer.state_dict())
    assert all(torch.equal(master, live.float()) for master, live in without._live.items())


def test_schedulers_groups_and_closures():
    ours, other = pair(torch.bfloat16)
    factory = FACTORIES["adamw"]
    optimizer = TiledOptimizer(factory, groups_of(ours)[:1], 200)
    optimizer.add_param_group(groups_of(ours)[1])
    reference = Untiled(factory, groups_of(other))
    assert [group["lr"] for group in optimizer.param_groups] == [2e-2, 1e-2]
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, [2e-2, 1e-2], 20) for o in (optimizer, reference.optimizer)]
    mine = train(ours, lambda: (optimizer.step(), schedules[0].step()))
    assert mine == train(other, lambda: (reference.step(), schedules[1].step()))
    assert_same(reference, optimizer)
    assert optimizer.step(lambda: 7) == 7


def test_wrong_arguments():
    ours, _ = pair(torch.bfloat16)
    for message, factory, tile_size in (
        ("tile_size = 0", FACTORIES["adamw"], 0),
        ("tile_size = 2.5", FACTORIES["adamw"], 2.5),
        ("returned NoneType", lambda groups: None, 10),
        ("Adafactor is not element-wise", torch.optim.Adafactor, 10),
    ):
        with pytest.raises(ValueError, match=message):
            TiledOptimizer(factory, ours.parameters(), tile_size)
    table = nn.Embedding(5, 3, sparse=True, dtype=torch.bfloat16)
    optimizer = TiledOptimizer(FACTORIES["adamw"], table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()


@pytest.mark.parametrize("name", FACTORIES)
def test_memory_of_a_step(name):
    """A tile, whatever the optimizer allocates and however large the model is; the first step also makes the state."""
    tile_size, mebibyte = 2**15, 2**20
    for count in (2, 5) if name == "adamw" else (2,):
        parameters = [nn.Parameter(torch.randn(700, 700, dtype=torch.bfloat16)) for _ in range(count)]
        optimizer = TiledOptimizer(FACTORIES[name], parameters, tile_size, max_norm=0.1)
        reference = Untiled(FACTORIES[name], [{"params": parameters}], max_norm=0.1)
        before = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
        for step in range(2):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            most = most_allocated(optimizer.step)
            state = sum(value.nbytes for state in optimizer.state.values() for value in state.values()) - before
            assert most <= 4 * tile_size + mebibyte + (state if step == 0 else 0)
        assert most_allocated(reference.step) > 4 * count * 700 * 700
