"""Stages, host memory and several groups of ranks at once, against torch's own optimizer on the whole model."""

import copy
import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import samo
from axonn_plugins.optim.store import Entry, make_stores
from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.samo.reference import Masked

RANKS, STEPS = 4, 4
FACTORIES = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
}
CASES = [("adamw", None, False), ("adamw", 0.02, True), ("momentum", 0.02, False), ("adagrad", None, True)]
COMBINATIONS = list(itertools.product((0, 1, 2), (False, True), (False, True)))


class Whole(nn.Module):
    """Two experts between layers that all ranks have; the scale is not in every batch's graph."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(7, 13), nn.Linear(13, 3)
        self.experts = nn.ModuleList(nn.Linear(13, 13) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x, expert, scaled):
        y = self.down(torch.tanh(self.experts[expert](torch.tanh(self.up(x)))))
        return (y * (self.scale.sum() if scaled else 1)).square().mean()


def whole(dtype=torch.float64):
    torch.manual_seed(0)
    model = Whole().to(dtype)
    generator = torch.Generator().manual_seed(1)
    masks = {n: torch.rand(p.shape, generator=generator) < 0.4 for n, p in model.named_parameters() if p.dim() > 1}
    return model, masks


def local(model, expert):
    """The model of a rank that has one of the experts; names are those of the whole model."""
    mine = copy.deepcopy(model)
    return mine, [(name, p) for name, p in mine.named_parameters() if not name.startswith(f"experts.{1 - expert}")]


def batch(step, rank, micro, dtype=torch.float64):
    """Tokens, whether the scale is used: never on two ranks, on one in its second microbatch alone."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(5, 7, generator=generator, dtype=dtype), rank == 3 or (rank == 1 and micro == 1)


def norm_of(pair):
    """Every element's square once: what pairs have counts on one rank of each."""

    def norm(squares):
        twice = [value for name, value in squares.items() if name.startswith("experts")]
        once = [value for name, value in squares.items() if not name.startswith("experts")]
        total = sum(once) / RANKS + sum(twice) / dist.get_world_size(pair)
        total = torch.as_tensor(total, dtype=torch.float64)
        dist.all_reduce(total)
        return total

    return norm


def pairs():
    return [dist.new_group([0, 2]), dist.new_group([1, 3])]


def optimizer_of(factory, named, masks, pair, **keywords):
    experts = {p for name, p in named if name.startswith("experts")}
    mine = None if masks is None else {name: masks[name] for name, _ in named if name in masks}
    keywords = {"tile_size": 37, "bucket_bytes": 600, "norm": norm_of(pair)} | keywords
    return samo.Optimizer(
        factory, named, mine, group=lambda p: (pair if p in experts else dist.group.WORLD, RANKS), **keywords
    )


def train(model, optimizer, rank, accumulate):
    for step in range(STEPS):
        for micro in range(2):
            x, scaled = batch(step, rank, micro)
            with accumulate() if micro == 0 else nullcontext():
                (model(x, rank % 2, scaled) / 2).backward()
        optimizer.step()


def reference(factory, masks, max_norm):
    model, _ = whole()
    optimizer = Masked(factory, model, masks or {}, max_norm)
    for step in range(STEPS):
        for rank, micro in itertools.product(range(RANKS), range(2)):
            x, scaled = batch(step, rank, micro)
            (model(x, rank % 2, scaled) / 2 / RANKS).backward()
        optimizer.step()
    return dict(model.named_parameters())


def distance(named, expected):
    return max(float((p - expected[name]).abs().max()) for name, p in named)


def kinds_of(case, every):
    """Stages, whether states are in host memory, and whether each pass reduces: all, or of each stage one that takes turns by case."""
    if every:
        return itertools.product((0, 1, 2), (False, True), (False, True))
    return [(stage, (case + stage) % 2 == 1, (case + stage) // 2 % 2 == 1) for stage in (0, 1, 2)]


def against_torch(all_kinds):
    rank, groups = dist.get_rank(), pairs()
    pair, found = groups[rank % 2], {}
    for case, (name, max_norm, pruned) in enumerate(CASES):
        model, masks = whole()
        masks = masks if pruned else None
        expected = reference(FACTORIES[name], masks, max_norm)
        for stage, host, every in kinds_of(case, all_kinds):
            mine, named = local(model, rank % 2)
            optimizer = optimizer_of(FACTORIES[name], named, masks, pair, max_norm=max_norm, stage=stage, host=host)
            train(mine, optimizer, rank, nullcontext if every else optimizer.no_sync)
            found[name, max_norm, pruned, stage, host, every] = distance(named, expected)
            assert all(p.dtype is torch.float64 for _, p in named)
            states = [v for s in optimizer.inner.state.values() for v in s.values() if v.dim()]
            assert states and all(value.dtype is torch.float64 for value in states)
    return found


@pytest.mark.parametrize("every", [False, thorough(True)])
def test_torchs_own_optimizer_on_the_whole_model(every):
    for found in run_ranks(against_torch, RANKS, every):
        assert len(found) == (48 if every else 12)
        assert {case: far for case, far in found.items() if far > 1e-12} == {}


def memory():
    """Bytes of gradients while none is wanted, and of state, by stage; where state is held."""
    found = {}
    for stage, host in itertools.product((0, 1, 2), (False, True)):
        layers = nn.Sequential(*(nn.Linear(32, 32, bias=False, dtype=torch.bfloat16) for _ in range(8)))
        optimizer = samo.Optimizer(
            FACTORIES["adamw"], layers, group=dist.group.WORLD, stage=stage, host=host, bucket_bytes=2048
        )
        most = 0

        def count(*_, optimizer=optimizer):
            nonlocal most
            full = [bucket for store in optimizer.stores for bucket in store.buckets if bucket.transient]
            most = max(most, sum(bucket.local is not None for bucket in full))

        for layer in layers:
            layer.weight.register_post_accumulate_grad_hook(count)
        for _ in range(2):
            layers(torch.randn(3, 32, dtype=torch.bfloat16)).float().square().sum().backward()
        (store,) = optimizer.stores
        left = sum(bucket.local is not None for bucket in store.buckets)
        optimizer.step()
        held = {id(v.untyped_storage()) for s in optimizer.inner.state.values() for v in s.values() if v.dim()}
        in_host = {id(vector.untyped_storage()) for vector in store.states.values()}
        found[stage, host] = store.gradient.nbytes, store.master.nbytes, most, left, held == in_host
    return found


def test_memory_of_stages():
    total = 8 * 32 * 32
    for (stage, host), (gradient, master, most, left, in_host) in run_ranks(memory, RANKS)[0].items():
        assert gradient == 2 * total // (RANKS if stage == 2 else 1)
        assert master == 4 * total // (RANKS if stage else 1)
        assert in_host == host
        assert (most, left) == ((0, 0) if stage == 2 else (0, 8))


def resume(folder, write, every):
    """State of any stage goes on in any other, on other ranks, in host memory or not."""
    found = {}
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(6, 12, 9, dtype=torch.float64, generator=generator)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    start = nn.Sequential(nn.Linear(9, 14), nn.Tanh(), nn.Linear(14, 4)).double()
    masks = {"0.weight": torch.rand(14, 9) < 0.5}
    dense = copy.deepcopy(start)
    expected = Masked(FACTORIES["adamw"], dense, masks)
    for each in rows:
        dense(each).square().mean().backward()
        expected.step()
    kinds = list(itertools.product((0, 1, 2), (False, True)))
    pairs = [((stage, True), None) for stage in (0, 1, 2)]
    if not write:
        pairs = list(itertools.product(kinds, (0, 1, 2)))
    for (stage, host), before in pairs if every or write else pairs[::4]:
        model = copy.deepcopy(start)
        optimizer = samo.Optimizer(
            FACTORIES["adamw"],
            model,
            masks,
            group=dist.group.WORLD,
            stage=stage,
            host=host,
            tile_size=29,
            bucket_bytes=500,
        )
        if not write:
            state = torch.load(f"{folder}/{before}.pt", weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for each in rows[:3] if write else rows[3:]:
            model(each.chunk(ranks)[rank]).square().mean().backward()
            optimizer.step()
        if write:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            if rank == 0:
                torch.save(state, f"{folder}/{stage}.pt")
        else:
            found[before, stage, host] = distance(model.named_parameters(), dict(dense.named_parameters()))
    return found


@pytest.mark.parametrize("every", [False, thorough(True)])
def test_checkpoints_of_four_ranks_go_on_on_two_and_three(tmp_path, every):
    run_ranks(resume, 4, tmp_path, True, every)
    for ranks in (2, 3):
        found = run_ranks(resume, ranks, tmp_path, False, every)[0]
        assert len(found) == (18 if every else 5)
        assert {case: far for case, far in found.items() if far > 1e-12} == {}


def ties():
    """Two stages of two replicas; a weight that both stages have gets the sum of their gradients before replicas average."""
    replicas, stages = pairs(), [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    part, replica = rank % 2, rank // 2
    torch.manual_seed(3)
    start = nn.ModuleDict({"tied": nn.Linear(6, 6), "0": nn.Linear(6, 6), "1": nn.Linear(6, 6)}).double()
    rows = torch.randn(STEPS, 2, 2, 5, 6, dtype=torch.float64)

    def loss_of(model, part, x):
        own = model["tied"](torch.tanh(model[str(part)](x)))
        return own.square().mean() if part else own.abs().mean()

    dense = copy.deepcopy(start)
    plain = FACTORIES["adamw"](dense.parameters())
    for step in rows:
        plain.zero_grad()
        for one in step.flatten(0, 1):
            (sum(loss_of(dense, part, one) for part in range(2)) / 4).backward()
        plain.step()
    found = {}
    for stage, host in itertools.product((0, 1, 2), (False, True)):
        model = copy.deepcopy(start)
        named = [(name, p) for name, p in model.named_parameters() if not name.startswith(str(1 - part))]
        optimizer = samo.Optimizer(
            FACTORIES["adamw"], named, group=replicas[part], stage=stage, host=host, tile_size=10, bucket_bytes=300
        )
        optimizer.reducer.active = False
        for step in rows:
            for one in step[replica]:
                (loss_of(model, part, one) / 2).backward()
            for parameter in model["tied"].parameters():
                dist.all_reduce(optimizer.gradient_of(parameter), group=stages[replica])
            optimizer.reducer.finish()
            if stage:
                with pytest.raises(RuntimeError, match="'tied.weight' is reduced"):
                    optimizer.gradient_of(model["tied"].weight)
            optimizer.step()
        found[stage, host] = distance(named, dict(dense.named_parameters()))
    return found


def test_ties_are_summed_before_they_are_reduced():
    for found in run_ranks(ties, RANKS):
        assert max(found.values()) < 1e-12, found


def low_precision(every):
    """Weights after steps of which one overflows on one rank, in expert gradients that only its pair sums."""
    rank, groups = dist.get_rank(), pairs()
    pair, found = groups[rank % 2], {}
    for dtype in (torch.float16, torch.bfloat16):
        apart = [(0, False, True), (1, True, True), (2, False, True)]
        if dtype is torch.bfloat16:
            apart = [(0, False, False), (1, False, False), (2, True, False)]
        for stage, host, pruned in COMBINATIONS if every else apart:
            model, masks = whole(dtype)
            mine, named = local(model, rank % 2)
            optimizer = optimizer_of(
                FACTORIES["adamw"],
                named,
                masks if pruned else None,
                pair,
                stage=stage,
                host=host,
                max_norm=0.5,
                loss_scale=samo.LossScale(2.0**8),
            )
            skipped, same = [], []
            for step in range(STEPS):
                before = [p.clone() for _, p in named]
                x, scaled = batch(step, rank, 0, dtype)
                optimizer.scale(mine(x, rank % 2, scaled).float()).backward()
                if step == 1:
                    optimizer.zero_grad()
                    for name, p in named:
                        bad = rank == 3 and name.startswith("experts")
                        p.grad = torch.full_like(p, float("inf") if bad else 1.0)
                optimizer.step()
                skipped.append(optimizer.overflow)
                same.append(all(torch.equal(p, was) for (_, p), was in zip(named, before, strict=True)))
            assert all(store.master.dtype is torch.float32 for store in optimizer.stores)
            weights = torch.cat([p.detach().flatten().double() for _, p in named])
            found[str(dtype), stage, host, pruned] = skipped, same, optimizer.loss_scale.scale, weights.numpy()
    return found


@pytest.mark.parametrize("every", [False, thorough(True)])
def test_sixteen_bits_with_an_overflow_on_one_rank(every):
    everywhere = run_ranks(low_precision, RANKS, every)
    for found in everywhere:
        for (dtype, _, _, pruned), (skipped, same, scale, weights) in found.items():
            assert skipped == same == [False, True, False, False] and scale == 2.0**7
            first = found[dtype, 0, False, pruned][3]
            assert abs(weights - first).max() < 2e-2
    for one, other in ((0, 2), (1, 3)):
        for case, (_, _, _, weights) in everywhere[one].items():
            assert (weights == everywhere[other][case][3]).all()


def unlike_passes():
    """Passes bring different gradients on different ranks; what tells passes apart is pruned whole, so never summed."""
    rank, far = dist.get_rank(), []
    for stage in (0, 1, 2):
        parameters = [nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(3)]
        masks = {"0": torch.zeros(3, dtype=torch.bool)}
        factory = partial(torch.optim.SGD, lr=1.0)
        optimizer = samo.Optimizer(
            factory, parameters, masks, group=dist.group.WORLD, stage=stage, bucket_bytes=8, tile_size=2
        )
        brought = {0: ((0, 1), (2, 0)), 1: ((1, 0, 2), (0, 2, 1)), 2: ((0,), (0,)), 3: ((2, 0), (0, 2))}
        for one_pass in brought[rank]:
            for number in one_pass:
                parameters[number].backward(torch.ones(3, dtype=torch.float64))
        optimizer.step()
        counts = [sum(ones.count(number) for passes in brought.values() for ones in passes) for number in range(1, 3)]
        expected = torch.tensor([1 - count / RANKS for count in counts], dtype=torch.float64)
        far.append(max(float((p - e).abs().max()) for p, e in zip(parameters[1:], expected, strict=True)))
    return far


def test_passes_that_bring_different_gradients_on_different_ranks():
    for far in run_ranks(unlike_passes, RANKS):
        assert max(far) < 1e-12


@pytest.mark.parametrize("host", [False, True])
def test_masters_that_a_state_dict_lacks_are_the_parameters(host):
    model, masks = whole(torch.bfloat16)
    first = samo.Optimizer(FACTORIES["adamw"], model, masks)
    for _ in range(3):
        model(torch.randn(5, 7, dtype=torch.bfloat16), 0, True).backward()
        first.step()
    state = samo.dense_state_dict(first)
    for values in state["state"].values():
        del values["master"]
    again, _ = whole(torch.bfloat16)
    second = samo.Optimizer(FACTORIES["adamw"], again, masks, host=host, tile_size=11)
    again.load_state_dict(model.state_dict())
    second.load_state_dict(state)
    assert all(torch.equal(*both) for both in zip(again.parameters(), model.parameters(), strict=True))
    masters = {segment.entry.name: segment.weights for store in second.stores for segment in store.segments}
    for entry in second.entries:
        assert torch.equal(masters[entry.name], entry.read(entry.flat, 0, entry.kept).float())
    moments = second.state_dict()["state"]
    for number, values in first.state_dict()["state"].items():
        assert all(torch.equal(moments[number][key], value) for key, value in values.items() if key != "master")


def test_host_memory_beside_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    found = []
    for host in (False, True):
        torch.manual_seed(5)
        model = nn.Sequential(*(nn.Linear(300, 300, dtype=torch.bfloat16) for _ in range(6))).cuda()
        masks = {name: torch.rand(p.shape) < 0.3 for name, p in model.named_parameters() if p.dim() > 1}
        optimizer = samo.Optimizer(
            FACTORIES["adamw"], model, masks, host=host, kernels=False, max_norm=0.1, tile_size=1000
        )
        for _ in range(5):
            model(torch.randn(9, 300, dtype=torch.bfloat16, device="cuda")).float().square().mean().backward()
            optimizer.step()
        if host:
            vectors = [store.master for store in optimizer.stores]
            vectors += [state for store in optimizer.stores for state in store.states.values()]
            assert len(vectors) == 3 and all(vector.is_pinned() for vector in vectors)
        found.append((optimizer.state_dict()["state"], [p.clone() for p in model.parameters()]))
    (device, weights), (visiting, same) = found
    assert all(torch.equal(*both) for both in zip(weights, same, strict=True))
    for number, values in device.items():
        assert all(torch.equal(value.cpu(), visiting[number][key].cpu()) for key, value in values.items())


@pytest.mark.parametrize(
    ("weights", "bucket_bytes", "sizes"),
    [
        (16, 25 * 2**20, [4, 4, 4, 4]),  # an eighth of 1 MiB is less than 256 KiB
        (64, 25 * 2**20, [8] * 8),
        (16, 2**17, [2] * 8),
        (3, 25 * 2**20, [3]),
    ],
)
def test_a_bucket_has_an_eighth_of_what_its_ranks_sum_and_at_least_256_kib(
    weights: int, bucket_bytes: int, sizes: list[int]
) -> None:
    entries = [Entry(str(number), nn.Parameter(torch.zeros(2**14)), 0) for number in range(weights)]
    (store,) = make_stores(entries, bucket_bytes)
    assert [len(bucket.entries) for bucket in store.buckets] == sizes
    assert [entry.name for entry in store.entries] == [str(number) for number in reversed(range(weights))]


def test_buckets_are_the_same_on_ranks_that_keep_other_elements_of_parameters_of_their_own() -> None:
    found = []
    for kept in (2**16, 2**14):
        own = [Entry(f"own {number}", nn.Parameter(torch.zeros(kept)), 0) for number in range(16)]
        shared = [Entry(str(number), nn.Parameter(torch.zeros(2**12)), 0, divisor=2) for number in range(64)]
        apart = [Entry(f"apart {number}", nn.Parameter(torch.zeros(2**12)), 0, divisor=2) for number in range(64)]
        for entry in apart:
            entry.replicated = ("x",)
        (store,) = make_stores([*own[:8], *shared, *apart, *own[8:]], 25 * 2**20)
        found.append([[entry.name for entry in bucket.entries] for bucket in store.buckets if bucket.divisor == 2])
    assert found[0] == found[1] and len(found[0]) == 8
    assert all(len({name.startswith("apart") for name in bucket}) == 1 for bucket in found[0])
