"""What a plain script does beside the optimizer: it is heard, or refused in a sentence, and never without effect."""

import copy
import gc
import weakref
from collections import defaultdict
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import samo
from tests.samo.reference import Masked

SGD = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)


def pruned(dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)).to(dtype)
    masks = {name: torch.rand(p.shape) < 0.5 for name, p in model.named_parameters() if p.dim() > 1}
    return model, masks


def train(model, step, steps=3, seed=1, scale=lambda loss: loss):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randn(4, 5, generator=generator).to(next(model.parameters()).dtype)
        scale(model(rows).square().mean()).backward()
        step()


def test_clipping_of_gradients_that_are_not_there_is_refused():
    model, masks = pruned()
    optimizer = samo.Optimizer(SGD, model, masks)
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_ finds no gradient in '0\.weight'.*max_norm"):
        train(model, lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    with pytest.raises(RuntimeError, match=r"clip_grad_value_ finds no gradient in '0\.weight'.*max_norm"):
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
    optimizer.step()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    assert nn.utils.clip_grad_norm_(other.parameters(), 0.1) > 0.1
    assert nn.utils.get_total_norm([p.grad for p in other.parameters()]) == pytest.approx(0.1, rel=1e-4)


def test_a_gradient_by_hand_counts_alone_or_is_refused():
    model, masks = pruned()
    dense = copy.deepcopy(model)
    optimizer, plain = samo.Optimizer(SGD, model, masks), SGD(dense.parameters())
    for net, steps in ((model, optimizer), (dense, plain)):
        torch.manual_seed(3)
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
        steps.step()
    for (name, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        keep = masks.get(name, torch.ones_like(mine, dtype=torch.bool))
        torch.testing.assert_close(mine, torch.where(keep, theirs, 0))
    train(model, lambda: None)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.raises(RuntimeError, match=r"'0\.weight' was given a gradient by hand beside.*register_hook"):
        optimizer.step()


def test_an_optimizer_that_steps_by_another_is_refused():
    class Ahead(torch.optim.Optimizer):
        def __init__(self, groups):
            super().__init__(groups, {})
            self.inner = SGD(self.param_groups)

        def step(self, closure=None):
            self.inner.step()

    with pytest.raises(ValueError, match=r"Ahead steps by an optimizer that it holds \(SGD\).*give SGD itself"):
        samo.Optimizer(Ahead, *pruned())


def test_a_grad_scaler_is_refused():
    model, masks = pruned(torch.float32)
    optimizer, scaler = samo.Optimizer(SGD, model, masks), torch.amp.GradScaler("cpu", init_scale=4.0)
    with pytest.raises(ValueError, match=r"GradScaler finds no gradients.*loss_scale = 'dynamic'"):
        train(model, lambda: scaler.step(optimizer), scale=scaler.scale)


def test_the_later_of_two_optimizers_has_the_gradients():
    model, masks = pruned()
    dense = copy.deepcopy(model)
    first = samo.Optimizer(SGD, model)
    second = samo.Optimizer(SGD, model, masks)
    train(model, second.step)
    train(dense, Masked(SGD, dense, masks).step)
    assert all(torch.equal(*both) for both in zip(model.parameters(), dense.parameters(), strict=True))
    with pytest.raises(RuntimeError, match="go to another optimizer that was made later"):
        first.step()
    del second
    train(model, lambda: None, steps=1)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_model_that_is_let_go_leaves_nothing_behind():
    def let_go():
        model, masks = pruned()
        optimizer = samo.Optimizer(SGD, model, masks)
        train(model, optimizer.step)
        return [weakref.ref(one) for one in (optimizer, *optimizer.stores, *model.parameters())]

    held = let_go()
    gc.collect()
    assert [one() for one in held] == [None] * len(held)


def replace_data(model, state):
    for name, parameter in model.named_parameters():
        parameter.data = state[name].clone()


@pytest.mark.parametrize("load", [nn.Module.load_state_dict, replace_data])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_that_are_loaded_later_count_and_what_is_pruned_stays_zero(dtype, load):
    model, masks = pruned(dtype)
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    dense = copy.deepcopy(model)
    optimizer, reference = samo.Optimizer(SGD, model, masks), Masked(SGD, dense, masks)
    train(model, optimizer.step)
    train(dense, reference.step)
    load(model, state)
    dense.load_state_dict(state)
    with torch.no_grad():
        for name, parameter in dense.named_parameters():
            reference.masters[name].copy_(parameter)
    with pytest.warns(UserWarning, match=r"what is pruned of '0\.weight' was written"):
        train(model, optimizer.step, steps=1)
    train(dense, reference.step, steps=1)
    train(model, optimizer.step)
    train(dense, reference.step)
    for (name, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
        assert name not in masks or not mine[~masks[name]].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("steps", [0, 2])
def test_weights_that_are_written_past_what_torch_counts_are_refused(dtype, steps):
    for undone, write in (
        (True, lambda weight: weight.data.add_(0.5)),
        (dtype == torch.bfloat16, lambda weight: weight.data.clamp_(-0.01, 0.01)),  # zeros stay
        (False, lambda weight: weight.data.add_(0)),
    ):
        model, masks = pruned(dtype)
        optimizer = samo.Optimizer(SGD, model, masks)
        train(model, optimizer.step, steps=steps)
        write(model[0].weight)
        with pytest.raises(RuntimeError, match=r"'0\.weight' was changed by \.data") if undone else nullcontext():
            train(model, optimizer.step, steps=1)
    model, masks = pruned(dtype)
    optimizer = samo.Optimizer(SGD, model, masks)
    train(model, optimizer.step, steps=steps)
    with torch.no_grad():
        model[2].weight.clamp_(-0.01, 0.01)
    train(model, optimizer.step, steps=1)
    assert model[2].weight.abs().max() < 0.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_that_are_loaded_before_a_pruning_or_a_checkpoint_count(dtype):
    """As a ticket's, which goes back to weights of before."""
    model, masks = pruned(dtype)
    start = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    dense = copy.deepcopy(model)
    dense.load_state_dict(start)
    optimizer = samo.Optimizer(SGD, model)
    train(model, optimizer.step)
    model.load_state_dict(start)
    state = optimizer.state_dict()["state"]
    assert dtype is torch.float64 or torch.equal(state[0]["master"].view(7, 5), start["0.weight"].float())
    optimizer.inner.state.clear()
    optimizer.prune(masks)
    train(model, optimizer.step)
    train(dense, Masked(SGD, dense, masks).step)
    for (name, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_memory_that_changes_under_the_compiled_step_counts_or_is_refused():
    """It goes by addresses: of a gradient of one number for all elements, and of weights in another order or type."""
    fused = partial(torch.optim.AdamW, lr=1e-2, fused=True)
    model, masks = pruned(torch.float32)
    dense = copy.deepcopy(model)
    optimizer, reference = samo.Optimizer(fused, model, masks), Masked(fused, dense, masks)
    for net, step in ((model, optimizer.step), (dense, reference.step)):
        train(net, step)
        for layer in (net[0], net[2]) if net is model else ():
            layer.weight.data = layer.weight.data.t().contiguous().t()
        for parameter in net.parameters():
            parameter.grad = torch.tensor(0.1).expand(parameter.shape)
        step()
        train(net, step)
    for mine, theirs in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    model.double()
    with pytest.raises(RuntimeError, match=r"'0\.weight' is torch.float64 on cpu, and was torch.float32"):
        train(model, optimizer.step)


def anew(optimizer):
    optimizer.state.clear()


def another(optimizer):
    optimizer.state = defaultdict(dict)


def one_by_one(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {}


def popped(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)


@pytest.mark.parametrize("throw_away", [anew, another, one_by_one, popped])
@pytest.mark.parametrize("host", [False, True])
def test_states_that_a_script_throws_away_are_forgotten(throw_away, host):
    model, masks = pruned()
    dense = copy.deepcopy(model)
    optimizer, reference = samo.Optimizer(SGD, model, masks, host=host), Masked(SGD, dense, masks)
    for _ in range(2):
        train(model, optimizer.step)
        train(dense, reference.step)
        throw_away(optimizer)
        throw_away(reference.optimizer)
    train(model, optimizer.step)
    train(dense, reference.step)
    assert all(torch.equal(*both) for both in zip(model.parameters(), dense.parameters(), strict=True))


def without_first(groups):
    groups[0]["params"] = groups[0]["params"][1:]


def with_another(groups):
    groups[1]["params"].append(nn.Parameter(torch.zeros(2)))


def with_another_group(groups):
    groups.append({**groups[0], "params": [nn.Parameter(torch.zeros(2))]})


def regrouped(groups):
    groups[1]["params"].insert(0, groups[0]["params"].pop())


@pytest.mark.parametrize("change", [without_first, with_another, with_another_group, regrouped])
def test_groups_that_a_script_gives_other_parameters_are_refused(change):
    model, masks = pruned()
    pairs = list(model.named_parameters())
    optimizer = samo.Optimizer(SGD, [{"params": pairs[:2]}, {"params": pairs[2:], "lr": 1e-3}], masks)
    train(model, optimizer.step)
    change(optimizer.param_groups)
    with pytest.raises(
        RuntimeError,
        match="param_groups have other parameters than when the optimizer was made.*make the optimizer anew",
    ):
        train(model, optimizer.step)


def test_a_state_that_was_taken_stays_what_it_was():
    model, masks = pruned()
    optimizer = samo.Optimizer(partial(torch.optim.AdamW, lr=1e-2), model, masks)
    train(model, optimizer.step)
    taken = optimizer.state_dict()
    kept = copy.deepcopy(taken)
    train(model, optimizer.step)
    for number, state in taken["state"].items():
        assert all(torch.equal(value, kept["state"][number][key]) for key, value in state.items())


def test_states_by_parameter_are_refused():
    model, masks = pruned()
    optimizer, weight = samo.Optimizer(SGD, model, masks), model[0].weight
    train(model, optimizer.step)
    assert weight not in optimizer.state and not list(optimizer.state.items())
    for use in (lambda: optimizer.state[weight]["momentum_buffer"], lambda: optimizer.state.update({weight: {"a": 1}})):
        with pytest.raises(RuntimeError, match=r"states of parts of parameters.*optimizer\.load_state_dict\(\)"):
            use()
    optimizer.state = {weight: {"momentum_buffer": torch.zeros(7, 5)}}
    with pytest.raises(RuntimeError, match="was given a parameter's states"):
        train(model, optimizer.step)


def test_a_schedule_goes_on_from_a_checkpoint():
    """Between two prunings nothing says what is pruned but the optimizer's state."""

    def run(model, optimizer, steps):
        generator = torch.Generator().manual_seed(steps[0])
        for step in steps:
            rows = torch.randn(4, 5, generator=generator).to(torch.float64)
            model(rows).square().mean().backward()
            optimizer.step()
            if schedule.due(step):
                optimizer.prune(samo.magnitude(model, schedule.sparsity(step)))

    schedule = samo.Schedule(0.8, start_step=2, end_step=10, interval=4, initial=0.3)
    model, _ = pruned()
    optimizer = samo.Optimizer(SGD, model)
    run(model, optimizer, range(1, 5))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    run(model, optimizer, range(5, 12))
    again, _ = pruned()
    resumed = samo.Optimizer(SGD, again)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert [entry.kept for entry in resumed.entries if entry.index is not None] == [24, 15]
    run(again, resumed, range(5, 12))
    assert all(torch.equal(*both) for both in zip(model.parameters(), again.parameters(), strict=True))
