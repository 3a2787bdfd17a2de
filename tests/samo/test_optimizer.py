import copy
import itertools
from functools import partial

import pytest
import torch
from torch import nn

import samo
from axonn_recipes.allocations import most_allocated
from tests.matrix import thorough
from tests.samo.reference import Masked

FACTORIES = {
    "adam": partial(torch.optim.Adam, lr=1e-2, foreach=False),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
}


class Model(nn.Module):
    """Odd sizes, a tied weight, a frozen one, an unused one, an empty one."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(37, 13)
        self.conv = nn.Conv1d(13, 13, 3, padding=1)
        self.inner = nn.Sequential(nn.Linear(13, 29), nn.GELU(), nn.Linear(29, 13))
        self.frozen = nn.Linear(13, 13)
        self.frozen.weight.requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.empty = nn.Parameter(torch.zeros(0, 7))
        self.head = nn.Linear(13, 37, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        hidden = self.table(tokens)
        hidden = hidden + self.conv(hidden.transpose(1, 2)).transpose(1, 2)
        hidden = hidden + self.inner(hidden)
        return self.head(self.frozen(hidden)).float()


def random_masks(model, sparsity, generator):
    return {
        name: torch.rand(p.shape, generator=generator) >= sparsity
        for name, p in model.named_parameters()
        if p.dim() > 1
    }


def train(model, step, scale=lambda loss: loss, steps=8, microbatches=1, seed=3):
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        for _ in range(microbatches):
            tokens = torch.randint(37, (4, 9), generator=generator)
            loss = nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            scale(loss).backward()
        step()
        losses.append(float(loss.detach()))
    return losses


def pair(sparsity=0.9, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    model = Model().to(dtype)
    masks = random_masks(model, sparsity, torch.Generator().manual_seed(seed + 1))
    return model, copy.deepcopy(model), masks


DTYPES = [torch.float32, torch.float64, torch.bfloat16]
EVERY_RUN = [*itertools.product(["adamw"], DTYPES), *zip(["adam", "sgd", "adagrad"], DTYPES, strict=True)]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [pair if pair in EVERY_RUN else thorough(*pair) for pair in itertools.product(FACTORIES, DTYPES)],
)
def test_the_bits_of_masked_dense_training(name, dtype):
    for sparsity in (0.0, 0.5, 0.9, 1.0):
        ours, dense, masks = pair(sparsity, dtype)
        optimizer = samo.Optimizer(FACTORIES[name], ours, masks, tile_size=100)
        reference = Masked(FACTORIES[name], dense, masks)
        assert train(ours, optimizer.step, microbatches=2) == train(dense, reference.step, microbatches=2)
        for (key, mine), theirs in zip(ours.named_parameters(), dense.parameters(), strict=True):
            assert torch.equal(mine, theirs), (key, sparsity)
            assert mine.grad is None
            if key in masks:
                assert torch.count_nonzero(mine[~masks[key]]) == 0


def test_fused_adamw():
    """Its kernel rounds the last elements of a tensor otherwise than the rest, so bits depend on where tensors end."""
    fused = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True)
    ours, dense, masks = pair(0.9)
    mine = train(ours, samo.Optimizer(fused, ours, masks, tile_size=100).step)
    assert mine == pytest.approx(train(dense, Masked(fused, dense, masks).step), rel=1e-5)


def test_clipping_and_loss_scaling():
    for dtype, scale in ((torch.float32, 8.0), (torch.bfloat16, None), (torch.float16, "dynamic")):
        ours, dense, masks = pair(0.8, dtype)
        optimizer = samo.Optimizer(FACTORIES["adamw"], ours, masks, max_norm=0.3, loss_scale=scale, tile_size=64)
        reference = Masked(FACTORIES["adamw"], dense, masks, max_norm=0.3)
        factor = 1.0 if scale is None else optimizer.loss_scale.scale
        mine = train(ours, optimizer.step, optimizer.scale)
        theirs = train(dense, lambda: reference.step(factor), lambda loss: loss * factor)  # noqa: B023
        assert mine == pytest.approx(theirs, rel=1e-5 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_bound_without_end_clips_nothing_whatever_the_norm(dtype):
    """As hosts ask for the norm: a gradient that is not finite, or whose square is not, leaves other weights as they would be."""
    start = torch.randn(40, generator=torch.Generator().manual_seed(0)).to(dtype)
    ours, theirs = (
        nn.Parameter(start.clone()),
        nn.Parameter(start.to(torch.float64 if dtype.itemsize > 4 else torch.float32)),
    )
    rate = partial(torch.optim.SGD, lr=1e-26)
    optimizer, reference = samo.Optimizer(rate, [ours], max_norm=float("inf")), rate([theirs])
    gradient = (1e25 * torch.randn(40, generator=torch.Generator().manual_seed(1))).to(dtype)
    for _ in range(2):
        ours.grad, theirs.grad = gradient.clone(), gradient.to(theirs.dtype)
        optimizer.step()
        reference.step()
        gradient[3] = torch.inf
    assert ours.isfinite().sum() == 39
    assert torch.equal(ours, theirs.to(dtype))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("saved", "dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.float64, torch.float32), (torch.float32, torch.float64)],
)
def test_a_state_of_another_type_is_taken_as_torch_takes_it(saved, dtype, fused):
    """As of torch's optimizer in 16 bits, which has no float32 weights beside."""
    factory = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    ours, dense, masks = pair(0.5, dtype)
    before = copy.deepcopy(dense).to(saved)
    first = factory([parameter for parameter in before.parameters() if parameter.requires_grad])
    train(before, lambda: (first.step(), first.zero_grad()), steps=3)
    for model in (ours, dense):
        model.load_state_dict(before.state_dict())
    trained = {name: parameter for name, parameter in ours.named_parameters() if parameter.requires_grad}
    masks = {name: mask for name, mask in masks.items() if name in trained}
    optimizer = samo.Optimizer(partial(factory, fused=fused), trained.items(), masks)
    reference = Masked(factory, dense, masks)
    for each in (optimizer, reference.optimizer):
        each.load_state_dict(copy.deepcopy(first.state_dict()))
    moments = {state["exp_avg"].dtype for state in optimizer.state_dict()["state"].values() if "exp_avg" in state}
    assert moments == {torch.promote_types(dtype, torch.float32)}
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    assert train(ours, optimizer.step) == pytest.approx(train(dense, reference.step), rel=close)


def test_overflows_are_skipped_as_gradscaler_does():
    ours, dense, masks = pair(0.8, torch.float16)
    scale = samo.LossScale(2.0**20, growth_interval=3)
    optimizer = samo.Optimizer(FACTORIES["adamw"], ours, masks, loss_scale=scale)
    before = copy.deepcopy(ours.state_dict())
    scales, skipped = [], []

    def step():
        optimizer.step()
        scales.append(scale.scale)
        skipped.append(optimizer.overflow)
        if all(skipped):
            assert all(torch.equal(value, before[key]) for key, value in ours.state_dict().items())
            assert not optimizer.inner.state

    losses = train(ours, step, optimizer.scale, steps=30)
    assert skipped[0] and not all(skipped)
    expected, good = 2.0**20, 0
    for now, skip in zip(scales, skipped, strict=True):
        good = 0 if skip else good + 1
        expected = expected / 2 if skip else expected * 2 if good % 3 == 0 else expected
        assert now == expected
    assert losses[-1] < losses[0]


def test_state_bytes():
    for dtype, dense, state in ((torch.bfloat16, 2, 16), (torch.float32, 4, 14)):
        model = nn.Sequential(nn.Linear(512, 700), nn.Linear(700, 512)).to(dtype)
        masks = random_masks(model, 0.9, torch.Generator().manual_seed(0))
        optimizer = samo.Optimizer(FACTORIES["adamw"], model, masks)
        model(torch.randn(3, 512, dtype=dtype)).sum().backward()
        optimizer.step()
        numel = sum(p.numel() for p in model.parameters())
        kept = sum(entry.kept for entry in optimizer.entries)
        assert optimizer.nbytes <= 1.01 * (dense * numel + state * kept)
        if dtype is torch.bfloat16:
            assert optimizer.nbytes < 0.185 * 20 * numel


def test_pruned_positions_stay_zero_for_a_thousand_steps():
    model = nn.Linear(19, 11)
    masks = {"weight": torch.rand(11, 19) < 0.1}
    optimizer = samo.Optimizer(FACTORIES["adamw"], model, masks)
    for _ in range(1000):
        model(torch.randn(4, 19)).square().sum().backward()
        optimizer.step()
    assert torch.count_nonzero(model.weight[~masks["weight"]]) == 0
    assert torch.count_nonzero(model.weight) == masks["weight"].sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pruning_in_the_middle_of_training(dtype):
    """State of what is kept goes on: as a dense run whose state is masked at that step."""
    ours, dense, masks = pair(0.8, dtype)
    optimizer = samo.Optimizer(FACTORIES["adamw"], ours, None, tile_size=77)
    reference = Masked(FACTORIES["adamw"], dense, {})
    assert train(ours, optimizer.step) == train(dense, reference.step)
    optimizer.prune(masks)
    names = {master: name for name, master in reference.masters.items()}
    with torch.no_grad():
        for name, mask in masks.items():
            reference.masks[name] = mask
            reference.masters[name].mul_(mask)
            reference.parameters[name].copy_(reference.masters[name])
        for master, state in reference.optimizer.state.items():
            for value in state.values():
                if value.dim():
                    value.mul_(reference.masks[names[master]])
    assert train(ours, optimizer.step, seed=4) == train(dense, reference.step, seed=4)
    assert torch.count_nonzero(ours.table.weight) <= masks["table.weight"].sum()


def test_groups_schedulers_and_resuming():
    def groups(model):
        decay = [(name, p) for name, p in model.named_parameters() if p.dim() > 1]
        rest = [(name, p) for name, p in model.named_parameters() if p.dim() <= 1]
        return [{"params": decay, "weight_decay": 0.2}, {"params": rest, "lr": 3e-3, "weight_decay": 0.0}]

    def training(model, masks):
        optimizer = samo.Optimizer(lambda given: torch.optim.AdamW(given, lr=1e-2), groups(model), masks, tile_size=50)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 3e-3], 40)

    ours, other, masks = pair(0.7)
    optimizer, schedule = training(ours, masks)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]

    def step(optimizer, schedule):
        optimizer.step()
        schedule.step()

    train(ours, partial(step, optimizer, schedule), steps=10)
    saved = copy.deepcopy((ours.state_dict(), optimizer.state_dict(), schedule.state_dict()))
    expected = train(ours, partial(step, optimizer, schedule), steps=10, seed=9)
    again, schedule = training(other, masks)
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    schedule.load_state_dict(saved[2])
    assert train(other, partial(step, again, schedule), steps=10, seed=9) == expected
    plain = torch.optim.AdamW([torch.zeros_like(p) for group in optimizer.param_groups for p in group["params"]])
    dense = samo.dense_state_dict(again)
    assert {number for number in dense["state"]} <= set(range(len(plain.param_groups[0]["params"])))


def test_wrong_arguments():
    ours, _, masks = pair()
    adamw = FACTORIES["adamw"]
    for message, arguments, keywords in (
        (
            "'table.wieght', which is no parameter.*'table.weight'",
            (adamw, ours, {"table.wieght": masks["table.weight"]}),
            {},
        ),
        (r"shape \(37, 13\)", (adamw, ours, {"table.weight": masks["table.weight"][1:]}), {}),
        ("torch.bool", (adamw, ours, {"table.weight": masks["table.weight"].float()}), {}),
        ("tile_size = 0", (adamw, ours), {"tile_size": 0}),
        ("stage = 1 needs", (adamw, ours), {"stage": 1}),
        ("stage = 3 is not", (adamw, ours), {"stage": 3}),
        ("max_norm = -1 is not a norm", (adamw, ours), {"max_norm": -1}),
        ("max_norm = nan is not a norm", (adamw, ours), {"max_norm": float("nan")}),
        ("loss_scale = 'big'", (adamw, ours), {"loss_scale": "big"}),
        ("Adafactor is not element-wise", (lambda given: torch.optim.Adafactor(given), ours), {}),
        ("not a torch optimizer", (lambda given: None, ours), {}),
        (
            "2 parameter groups where it was given 1.* as they are",
            (lambda given: torch.optim.SGD([given[0], {"params": []}]), ours),
            {},
        ),
    ):
        with pytest.raises(ValueError, match=message):
            samo.Optimizer(*arguments, **keywords)
    optimizer = samo.Optimizer(adamw, ours, masks)
    with pytest.raises(ValueError, match="parameters in 1 groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})
    with pytest.raises(ValueError, match="give all parameter groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    ours.frozen.weight.grad = torch.zeros(13, 13)
    with pytest.raises(RuntimeError, match="'frozen.weight' has a gradient but was frozen"):
        optimizer.step()


def test_zero_grad_forgets_every_gradient():
    ours, _, masks = pair()
    optimizer = samo.Optimizer(FACTORIES["adamw"], ours, masks)
    before = {name: parameter.clone() for name, parameter in ours.named_parameters()}
    ours.frozen.weight.requires_grad_(True)
    ours(torch.arange(6)[None]).sum().backward()
    assert ours.frozen.weight.grad is not None
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in ours.parameters())
    optimizer.step()
    assert all(torch.equal(parameter, before[name]) for name, parameter in ours.named_parameters())


def test_peak_memory_of_a_whole_step():
    layers = [nn.Linear(600, 600, bias=False, dtype=torch.bfloat16) for _ in range(6)]
    model = nn.Sequential(*layers)
    masks = random_masks(model, 0.9, torch.Generator().manual_seed(0))
    optimizer = samo.Optimizer(FACTORIES["adamw"], model, masks, tile_size=4096)
    rows = torch.randn(2, 600, dtype=torch.bfloat16)

    def step():
        model(rows).sum().backward()
        optimizer.step()

    step()
    one_gradient, tile, activations = 2 * 600 * 600, 4096 * 40, 20_000
    # Processors without products in bf16 copy a product's operands besides.
    alone = nn.Linear(600, 600, bias=False, dtype=torch.bfloat16)
    inputs = rows.clone().requires_grad_()
    one_product = most_allocated(lambda: alone(inputs).sum().backward())
    assert one_gradient < most_allocated(step) < one_product + tile + activations
    model(rows).sum().backward()
    assert most_allocated(optimizer.step) < tile


def test_what_was_pruned_whole_goes_on_with_the_others_steps():
    ours, dense, masks = pair(0.5)
    nothing = {name: torch.zeros_like(mask) for name, mask in masks.items()}
    optimizer, reference = samo.Optimizer(FACTORIES["adam"], ours, nothing), Masked(FACTORIES["adam"], dense, nothing)
    assert train(ours, optimizer.step, steps=3) == train(dense, reference.step, steps=3)
    optimizer.prune(masks)
    reference.masks |= masks
    assert train(ours, optimizer.step, steps=3) == train(dense, reference.step, steps=3)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), dense.parameters(), strict=True))


def test_gradients_of_other_kept_elements_are_not_lost():
    ours, _, masks = pair(0.5)
    optimizer = samo.Optimizer(FACTORIES["adam"], ours)
    with pytest.raises(RuntimeError, match="no step has consumed"):
        train(ours, lambda: optimizer.prune(masks), steps=1)
    optimizer.zero_grad()
    optimizer.prune(masks)
