"""The bucketed optimizer beside the same optimizer on float32 weights whose gradients are upcast whole."""

import copy
import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from axonn_plugins.pipeline.bucketed_optimizer import BucketedOptimizer
from axonn_plugins.pipeline.host_store import HostStore
from axonn_plugins.pipeline.reduction import chunks_of
from axonn_recipes.allocations import most_allocated
from ted_moe import TiledOptimizer
from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.ted_moe.test_tiled_optimizer import FACTORIES, Untiled, assert_same, groups_of, pair, train

CASES = [(name, torch.bfloat16) for name in FACTORIES]
CASES += [(name, torch.float32) for name in ("adamw", "momentum", "adagrad")]
CASES += [("adamw", torch.float16), ("adamw", torch.float64)]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_bits_of_the_plain_optimizer(name, dtype):
    for bucket_size in (1024, 10**6):
        ours, other = pair(dtype)
        optimizer = BucketedOptimizer(FACTORIES[name], groups_of(ours), bucket_size)
        reference = Untiled(FACTORIES[name], groups_of(other))
        assert train(ours, optimizer.step) == train(other, reference.step)
        assert all(torch.equal(*both) for both in zip(ours.parameters(), other.parameters(), strict=True))
        if dtype.itemsize == 2:
            assert_same(reference, optimizer)


def test_fused_kernels_agree_to_rounding():
    fused = partial(torch.optim.AdamW, lr=1e-2, fused=True)
    ours, other = pair(torch.bfloat16)
    mine = train(ours, BucketedOptimizer(fused, groups_of(ours), 1024).step)
    assert mine == pytest.approx(train(other, Untiled(fused, groups_of(other)).step), rel=1e-4)


def test_clipping_and_loss_scaling():
    """A dynamic GradScaler: overflows are skipped, the rest is what unscaled weights would do."""
    ours, other = pair(torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=2)
    optimizer = BucketedOptimizer(FACTORIES["adamw"], groups_of(ours), 3008, max_norm=0.5)
    reference = Untiled(FACTORIES["adamw"], groups_of(other), max_norm=0.5)
    scales, skipped = [], []

    def step():
        scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        skipped.append(optimizer.overflow)

    mine = train(ours, step, 12, scaler.scale)
    assert any(skipped) and not all(skipped)
    microbatches, steps = itertools.count(), itertools.count()

    def reference_step():
        number = next(steps)
        if not skipped[number]:
            reference.step(scales[number])

    assert mine == train(other, reference_step, 12, lambda loss: loss * scales[next(microbatches) // 2])
    assert_same(reference, optimizer)


@pytest.mark.parametrize("name", ["adamw", "adagrad", "momentum"])
def test_state_dicts_are_the_plain_optimizers(name):
    ours, other = pair(torch.bfloat16)
    optimizer = BucketedOptimizer(FACTORIES[name], groups_of(ours), 1024)
    reference = Untiled(FACTORIES[name], groups_of(other))
    train(ours, optimizer.step), train(other, reference.step)
    mine, theirs = optimizer.state_dict(), reference.optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"] and mine["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert mine["state"][number].keys() == state.keys()
        assert all(value is None or torch.equal(mine["state"][number][k], value) for k, value in state.items())

    again, third = pair(torch.bfloat16, seed=1)
    again.load_state_dict(ours.state_dict()), third.load_state_dict(other.state_dict())
    resumed = BucketedOptimizer(FACTORIES[name], groups_of(again), 2048)
    resumed.load_state_dict(copy.deepcopy(mine))
    expected = train(ours, optimizer.step, seed=4)
    assert train(again, resumed.step, seed=4) == expected
    without = BucketedOptimizer(FACTORIES[name], groups_of(third))
    without.load_state_dict(reference.optimizer.state_dict())
    assert all(torch.equal(master, live.float()) for master, live in without._live.items())


@pytest.mark.parametrize("kind", [TiledOptimizer, BucketedOptimizer])
def test_weights_that_are_loaded_later_count(kind):
    ours, other = pair(torch.bfloat16)
    optimizer, reference = (
        kind(FACTORIES["adamw"], groups_of(ours), 1024),
        Untiled(FACTORIES["adamw"], groups_of(other)),
    )
    assert train(ours, optimizer.step) == train(other, reference.step)
    loaded = pair(torch.bfloat16, seed=1)[0].state_dict()
    ours.load_state_dict(loaded)
    weight = ours.layers[0].weight
    weight.data = weight.data.t().contiguous().t()  # in another order
    for parameter, name in ((parameter, name) for name, parameter in other.named_parameters()):
        parameter.data = loaded[name].clone()
        next(master for live, master in reference.pairs if live is parameter).data.copy_(loaded[name])
    assert train(ours, optimizer.step) == train(other, reference.step)
    assert_same(reference, optimizer)


@pytest.mark.parametrize("kind", [TiledOptimizer, BucketedOptimizer])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_written_past_what_torch_counts(kind, dtype):
    """Refused where they would be undone; taken where the parameter is all that there is."""
    for steps in (0, 2):
        ours, _ = pair(dtype)
        optimizer = kind(FACTORIES["adamw"], ours.parameters(), 1024)
        train(ours, optimizer.step, steps)
        next(ours.parameters()).data.add_(1)
        alone = dtype == torch.float32 and kind is TiledOptimizer
        with nullcontext() if alone else pytest.raises(RuntimeError, match=r"'0' was changed by \.data"):
            train(ours, optimizer.step, 1)


def test_schedulers_groups_and_closures():
    ours, other = pair(torch.bfloat16)
    optimizer = BucketedOptimizer(FACTORIES["adamw"], groups_of(ours)[:1], 1024)
    optimizer.add_param_group(groups_of(ours)[1])
    reference = Untiled(FACTORIES["adamw"], groups_of(other))
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, [2e-2, 1e-2], 20) for o in (optimizer, reference.optimizer)]
    mine = train(ours, lambda: (optimizer.step(), schedules[0].step()))
    assert mine == train(other, lambda: (reference.step(), schedules[1].step()))
    assert_same(reference, optimizer)
    assert optimizer.step(lambda: 7) == 7


@pytest.mark.parametrize("name", ["adamw", "foreach", "momentum"])
def test_device_memory(name):
    """4φ bytes and 16·bsize, whatever the optimizer allocates and however large the model is; the rest is the host's."""
    bucket_size, side = 2**14, 320
    for count in (2, 4):
        parameters = [nn.Parameter(torch.randn(side, side, dtype=torch.bfloat16)) for _ in range(count)]
        optimizer = BucketedOptimizer(FACTORIES[name], parameters, bucket_size, max_norm=0.1)
        for step in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            assert optimizer.device_bytes == 4 * count * side**2
            assert 15 * bucket_size < optimizer.step_bytes <= 16 * bucket_size
            before = optimizer.host_bytes
            most = most_allocated(optimizer.step)
            assert most <= 16 * bucket_size + optimizer.host_bytes - before + 2**14, (step, most)
        states = 1 if name == "momentum" else 2
        assert optimizer.host_bytes == (1 + states) * 4 * count * side**2


def test_gradients_stand_end_to_end():
    """With a group there are 2φ bytes of gradients, and none beside them."""
    layer = nn.Linear(33, 5, dtype=torch.bfloat16)
    store = HostStore(0, list(layer.parameters()))
    store.own_gradients()
    x = torch.randn(7, 33, dtype=torch.bfloat16)
    for _ in range(2):
        layer(x).float().square().sum().backward()
    expected = copy.deepcopy(layer)
    expected.zero_grad()
    for _ in range(2):
        expected(x).float().square().sum().backward()
    flat = torch.cat([p.grad.reshape(-1) for p in expected.parameters()])
    assert torch.equal(store.gradient, flat) and store.device_bytes == 4 * (33 * 5 + 5)
    layer.zero_grad()
    store.take_gradients()
    assert not store.gradient.any() and not layer.weight.grad.any()
    parts = [store.gradient[store.packed(c.begin) : store.packed(c.end)] for c in chunks_of([store], 64)]
    assert sum(len(part) for part in parts) == 33 * 5 + 5 and len(parts) == 4


def test_the_last_chunk_goes_in_halves():
    store = HostStore(0, [nn.Parameter(torch.zeros(100, 100))])
    sizes = [chunk.end - chunk.begin for chunk in chunks_of([store], 4096, 512)]
    ends = [chunk.end for chunk in chunks_of([store], 4096, 512)]
    assert ends == [sum(sizes[: i + 1]) for i in range(len(sizes))] and ends[-1] == store.length
    assert sizes[:2] == [4096, 4096] and len(sizes) > 3 and sizes[2:] == sorted(sizes[2:], reverse=True)
    assert sizes[-1] <= 512 and [chunk.begin for chunk in chunks_of([store], 4096)] == [0, 4096, 8192]


def _averages(cases):
    """Parameters of each case after some steps, with overlap and without, and of whole gradients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = []
    for dtype, keywords in cases:
        results = []
        for overlap in (True, False):
            model, _ = pair(dtype)
            optimizer = BucketedOptimizer(
                FACTORIES["adamw"], groups_of(model), 1024, group=dist.group.WORLD, overlap=overlap, **keywords
            )
            train(model, optimizer.step, seed=rank)
            results.append(torch.cat([p.detach().reshape(-1).double() for p in model.parameters()]).numpy())
        model, _ = pair(dtype)
        keywords.pop("coarsening", None)
        plain = BucketedOptimizer(FACTORIES["adamw"], groups_of(model), **keywords)

        def step(model=model, plain=plain):
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad.div_(ranks))
            plain.step()

        train(model, step, seed=rank)
        results.append(torch.cat([p.detach().reshape(-1).double() for p in model.parameters()]).numpy())
        found.append(results)
    return found, _scaled(rank)


def _scaled(rank):
    """Losses' scales when one rank's gradients overflow, and what is said where averages are forgotten."""
    model, _ = pair(torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    optimizer = BucketedOptimizer(FACTORIES["adamw"], groups_of(model), 1024, group=dist.group.WORLD)
    scales, message = [], ""
    for step in range(3):
        model.zero_grad()
        loss = model(torch.randn(4, 3, 5, 5, dtype=torch.float16))
        scaler.scale(loss * (1e6 if step == 1 and rank == 1 else 1)).backward()
        if step == 2:
            try:
                scaler.step(optimizer)
            except ValueError as error:
                message = str(error)
            continue
        optimizer.reduce()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    model, _ = pair(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = BucketedOptimizer(FACTORIES["adamw"], groups_of(model), 1024, group=dist.group.WORLD)
    scaler.scale(model(torch.randn(4, 3, 5, 5)) * (float("inf") if rank == 1 else 1)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(
        ValueError, match=r"before scaler.unscale_"
    ):  # of which the overflowing rank would have stepped out
        scaler.step(optimizer)
    return scales, message


@pytest.mark.parametrize("ranks", [2, thorough(4)])
def test_updates_while_averages_are_under_way(ranks):
    """To the bit that of averaging first; with two ranks, whose sums have one order, that of averaging whole gradients."""
    cases = [(torch.bfloat16, {"coarsening": 1}), (torch.bfloat16, {"coarsening": 3}), (torch.float32, {})]
    cases += [(torch.bfloat16, {"max_norm": 0.05})]
    everywhere = run_ranks(_averages, ranks, cases)
    for found, (scales, message) in everywhere:
        for (overlapped, first, whole), (same, _, _) in zip(found, everywhere[0][0], strict=True):
            assert (overlapped == first).all() and (overlapped == same).all()
            assert (overlapped == whole).all() if ranks == 2 else abs(overlapped - whole).max() < 0.1
        assert scales == [2.0**14, 2.0**13] and "call optimizer.reduce()" in message


def _left_out():
    """Weights after a step behind averages that no step followed, in float64, and those of one process."""
    torch.manual_seed(1)
    rank, model = dist.get_rank(), nn.Linear(3, 2).double()
    alone = copy.deepcopy(model)
    inputs = torch.randn(2, dist.get_world_size(), 5, 3, dtype=torch.float64)
    optimizer = BucketedOptimizer(partial(torch.optim.SGD, lr=0.1), model.parameters(), 1024, group=dist.group.WORLD)
    for turn, mine in enumerate(inputs[:, rank]):
        optimizer.zero_grad()
        model(mine).square().mean().backward()
        optimizer.reduce()
        if turn == 1:  # the first was left out, as where a script finds its norm too large
            optimizer.step()
    alone(inputs[1].flatten(0, 1)).square().mean().backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    return [p.tolist() for p in model.parameters()], [p.tolist() for p in alone.parameters()]


def test_averages_without_a_step_are_not_those_of_the_next():
    for found, expected in run_ranks(_left_out, 2):
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.allclose(
                *(torch.tensor(one, dtype=torch.float64) for one in (mine, theirs)), rtol=0, atol=1e-10
            )


def test_wrong_arguments():
    ours, _ = pair(torch.bfloat16)
    for message, factory, keywords in (
        ("bucket_size = 0", FACTORIES["adamw"], {"bucket_size": 0}),
        ("bucket_size = 2.5", FACTORIES["adamw"], {"bucket_size": 2.5}),
        ("coarsening = 0", FACTORIES["adamw"], {"coarsening": 0}),
        ("max_norm = -1", FACTORIES["adamw"], {"max_norm": -1}),
        ("returned NoneType", lambda groups: None, {}),
        ("Adafactor is not element-wise", torch.optim.Adafactor, {}),
    ):
        with pytest.raises(ValueError, match=message):
            BucketedOptimizer(factory, ours.parameters(), **keywords)
    table = nn.Embedding(5, 3, sparse=True, dtype=torch.bfloat16)
    optimizer = BucketedOptimizer(FACTORIES["adamw"], table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()


def test_on_the_gpu():
    """The same bits as on the CPU's device bookkeeping says, memory from the allocator."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    bucket_size = 2**20
    factory = partial(torch.optim.AdamW, lr=1e-2, fused=True)
    start = [torch.randn(2048, 1024, dtype=torch.bfloat16) for _ in range(4)]
    ours, other = ([nn.Parameter(p.cuda()) for p in start] for _ in range(2))
    optimizer, reference = BucketedOptimizer(factory, ours, bucket_size), Untiled(factory, [{"params": other}])
    for step in range(3):
        for mine, theirs in zip(ours, other, strict=True):
            mine.grad = torch.randn_like(mine)
            theirs.grad = mine.grad.clone()
        assert most_allocated(optimizer.step, "cuda") <= 16 * bucket_size + 2**16, step
        reference.step()
    assert_same_on_host(reference, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    optimizer.step(), reference.step()
    assert_same_on_host(reference, optimizer)


def assert_same_on_host(reference, optimizer):
    torch.cuda.synchronize()
    for (live, weights), (master, parameter) in zip(reference.pairs, optimizer._live.items(), strict=True):
        assert torch.equal(live, parameter) and torch.equal(weights.cpu(), master)
