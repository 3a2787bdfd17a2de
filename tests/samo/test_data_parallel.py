import copy
import functools
import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import samo
from axonn_plugins.optim.reducer import FLAG_BYTES
from axonn_recipes.allocations import most_allocated
from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.samo.reference import Masked
from tests.samo.test_optimizer import FACTORIES, pair

ADAMW, RANKS = FACTORIES["adamw"], 4


def loss_of(model, generator):
    tokens = torch.randint(37, (2, 9), generator=generator)
    return nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def run(model, step, ranks, rank, steps=4, seed=5, microbatches=1, no_sync=nullcontext, skip=0):
    """Losses, averaged over ranks; each rank reads its part of the tokens of `ranks` ranks."""
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for number in range(steps):
        total = torch.zeros(())
        for micro in range(microbatches):
            mine = []
            for other in range(ranks):
                seeds = int(torch.randint(2**31, (), generator=generator))
                if (other - rank) % dist.get_world_size() == 0:
                    mine.append(seeds)
            if number < skip:
                continue
            with no_sync() if micro < microbatches - 1 else nullcontext():
                loss = sum(loss_of(model, torch.Generator().manual_seed(each)) for each in mine) / len(mine)
                loss.backward()
            total += loss.detach()
        if number < skip:
            continue
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size() / microbatches)
        step()
    return losses


def dense_step(reference):
    def step():
        for parameter in reference.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()
                dist.all_reduce(parameter.grad)
        reference.step()

    return step


def state_bytes(optimizer):
    return optimizer.nbytes - sum(entry.parameter.nbytes for entry in optimizer.entries)


def four_ranks(every):
    rank, found = dist.get_rank(), {}

    @functools.cache
    def masked_dense(factory, max_norm, microbatches):
        _, dense, masks = pair(0.8)
        reference = Masked(factory, dense, masks, max_norm)
        return run(dense, dense_step(reference), 4, rank, microbatches=microbatches)

    cases = {
        "plain": {},
        "buckets": {"bucket_bytes": 500},
        "shard": {"stage": 1, "bucket_bytes": 700},
        "clipped": {"max_norm": 0.2},
        "clipped shard": {"max_norm": 0.2, "stage": 1},
        "fused": {"factory": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True), "stage": 1},
    }
    for number, (name, keywords) in enumerate(cases.items()):
        for microbatches in (1, 3) if every else (3 - number % 2 * 2,):
            ours, _, masks = pair(0.8)
            keywords = {"factory": ADAMW} | keywords
            optimizer = samo.Optimizer(params=ours, masks=masks, group=dist.group.WORLD, tile_size=90, **keywords)
            mine = run(ours, optimizer.step, 4, rank, microbatches=microbatches, no_sync=optimizer.no_sync)
            theirs = masked_dense(keywords["factory"], keywords.get("max_norm"), microbatches)
            found[f"{name} {microbatches}"] = mine, theirs
    for name, keywords in {"twice": {}, "twice shard": {"stage": 1}}.items():
        # Both backward passes of a step reduce: as without no_sync, only dearer.
        ours, _, masks = pair(0.8)
        optimizer = samo.Optimizer(ADAMW, ours, masks, group=dist.group.WORLD, bucket_bytes=700, **keywords)
        mine = run(ours, optimizer.step, 4, rank, microbatches=2)
        found[name] = mine, masked_dense(ADAMW, None, 2)
    # Only some ranks use a layer.
    ours, _, masks = pair(0.8)
    optimizer = samo.Optimizer(ADAMW, ours, masks, group=dist.group.WORLD)
    for number in range(3):
        loss = loss_of(ours, torch.Generator().manual_seed(rank))
        (loss + ours.unused(torch.ones(3)).sum() * (rank == number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([parameter.detach().flatten() for parameter in ours.parameters()])
    every = [torch.empty_like(weights) for _ in range(4)]
    dist.all_gather(every, weights)
    found["alike"] = all(torch.equal(other, weights) for other in every)
    ours, _, masks = pair(0.8, torch.bfloat16)
    optimizer = samo.Optimizer(ADAMW, ours, masks, group=dist.group.WORLD, bucket_bytes=200)
    sent = []
    real = dist.all_reduce
    dist.all_reduce = lambda tensor, *args, **kwargs: (sent.append(tensor.nbytes), real(tensor, *args, **kwargs))[1]
    loss_of(ours, torch.Generator().manual_seed(rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce = real
    flags = FLAG_BYTES * (1 + sum(map(len, optimizer.reducer._reduced.values())))  # of entries in buckets with anything
    found["bytes"] = len(sent), sum(sent) - flags, 2 * sum(entry.kept for entry in optimizer.entries)
    sharded = samo.Optimizer(ADAMW, copy.deepcopy(ours), masks, group=dist.group.WORLD, stage=1)
    whole = samo.Optimizer(ADAMW, copy.deepcopy(ours), masks)
    found["masters"] = sharded.stores[0].master.numel(), whole.stores[0].master.numel()
    found["sums of others"] = [said_of_ddp(model) for model in ("whole", "inner")]
    return found


def said_of_ddp(given):
    """What is said where DistributedDataParallel is to sum gradients that the optimizer takes first."""
    layer = nn.Linear(3, 2)
    wrapped = nn.parallel.DistributedDataParallel(layer)
    try:
        optimizer = samo.Optimizer(ADAMW, wrapped if given == "whole" else layer)
        wrapped(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    except (ValueError, RuntimeError) as error:
        return str(error)


def checkpoint(folder):
    """Checkpoint of four ranks after 2 of 4 steps, sharded; and the losses of all 4."""
    rank, found = dist.get_rank(), {}
    for dtype in (torch.float32, torch.bfloat16):
        ours, _, masks = pair(0.8, dtype)
        optimizer = samo.Optimizer(ADAMW, ours, masks, group=dist.group.WORLD, stage=1, bucket_bytes=700, tile_size=70)
        losses = run(ours, optimizer.step, 4, rank, steps=2)
        saved = copy.deepcopy((ours.state_dict(), optimizer.state_dict()))
        losses += run(ours, optimizer.step, 4, rank, skip=2)
        path = f"{folder}/{str(dtype)[6:]}.pt"
        if rank == 0:
            torch.save(saved, path)
        found[str(dtype)] = losses
    return found


def resume(folder):
    rank, found = dist.get_rank(), {}
    for dtype in (torch.float32, torch.bfloat16):
        model_state, state = torch.load(f"{folder}/{str(dtype)[6:]}.pt", weights_only=True)
        for shard in (False, True):
            ours, dense, masks = pair(0.8, dtype)
            ours.load_state_dict(model_state)
            optimizer = samo.Optimizer(ADAMW, ours, masks, group=dist.group.WORLD, stage=int(shard), tile_size=41)
            optimizer.load_state_dict(state)
            found[f"{dtype} {shard}"] = run(ours, optimizer.step, 4, rank, skip=2)
        dense.load_state_dict(model_state)
        reference = Masked(ADAMW, dense, masks)
        whole = samo.dense_state_dict(optimizer_at(dense, masks, state))
        by_number = dict(enumerate(dense.parameters()))
        for number, values in whole["state"].items():
            if "master" in values:
                reference.masters[next(n for n, p in dense.named_parameters() if p is by_number[number])].copy_(
                    values.pop("master")
                )
        kept = [number for number, parameter in by_number.items() if parameter.requires_grad]
        trained = {kept.index(number): values for number, values in whole["state"].items() if "exp_avg" in values}
        groups = [{**whole["param_groups"][0], "params": list(range(len(kept)))}]
        reference.optimizer.load_state_dict({"state": trained, "param_groups": groups})
        found[f"{dtype} dense"] = run(dense, dense_step(reference), 4, rank, skip=2)
    return found


def optimizer_at(model, masks, state):
    optimizer = samo.Optimizer(ADAMW, copy.deepcopy(model), masks)
    optimizer.load_state_dict(state)
    return optimizer


@pytest.mark.parametrize("every", [False, thorough(True)])
def test_four_ranks(every):
    for found in run_ranks(four_ranks, 4, every):
        calls, total, expected = found.pop("bytes")
        assert calls > 2 and total == expected
        assert found.pop("alike")
        for said in found.pop("sums of others"):
            assert "DistributedDataParallel finds no gradients" in said and "group" in said
        part, whole = found.pop("masters")
        assert whole <= 4 * part < whole + 4 * 4
        for name, (mine, theirs) in found.items():
            assert mine == pytest.approx(theirs, rel=1e-5), name


def test_a_checkpoint_of_four_ranks_resumes_on_two_and_densely(tmp_path):
    expected = run_ranks(checkpoint, 4, tmp_path)[0]
    found = run_ranks(resume, 2, tmp_path)[0]
    for name, losses in found.items():
        dtype = name.split()[0]
        assert losses == pytest.approx(expected[dtype][2:], rel=1e-5 if "32" in dtype else 2e-2), name


def pruned_further(stage):
    """Of each pruning: bytes that this rank gives to others, and by hand; the most memory it takes, and what all of the state would take."""
    rank, moved = dist.get_rank(), []
    original = dist.all_to_all_single

    def counting(into, flat, origin, to, group=None):
        moved.append((sum(to) - to[rank]) * flat.element_size())
        return original(into, flat, origin, to, group=group)

    def owners(optimizer):
        """By entry, which rank holds the state of each of its elements; -1: none, it is pruned."""
        found = {}
        for bucket in (bucket for store in optimizer.stores for bucket in store.buckets):
            length = (bucket.end - bucket.begin) // RANKS
            for entry in bucket.entries:
                held = torch.arange(entry.start - bucket.begin, entry.start - bucket.begin + entry.kept) // length + 1
                found[entry] = entry.dense(held.int()) - 1
        return found

    generator = torch.Generator().manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 101)).bfloat16()
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator))
    optimizer = samo.Optimizer(ADAMW, model, group=dist.group.WORLD, stage=stage, host=stage == 2, bucket_bytes=2**15)
    dist.all_to_all_single, found = counting, []
    for sparsity in (0.3, 0.6, 0.61):
        model(torch.randn(4, 300, generator=generator).bfloat16()).square().mean().backward()
        optimizer.step()
        before, masks, state = owners(optimizer), samo.magnitude(model, sparsity), optimizer.state_dict()["state"]
        moved.clear()
        most = most_allocated(lambda masks=masks: optimizer.prune(masks))
        gathered = most_allocated(optimizer.state_dict)
        for (entry, now), was in zip(owners(optimizer).items(), before.values(), strict=True):
            found.append(int(((was == rank) & (now >= 0) & (now != rank)).sum()) * 3 * 4)
            number = next(n for n, p in enumerate(model.parameters()) if p is entry.parameter)
            read, old = optimizer.state_dict()["state"][number], state[number]
            for key in ("exp_avg", "exp_avg_sq", "master"):
                full = torch.zeros(entry.parameter.numel())
                full[old.get("positions", torch.arange(entry.parameter.numel())).long()] = old[key]
                assert torch.equal(read[key], full[read.get("positions", torch.arange(len(full))).long()]), key
            assert read["step"] == old["step"]
        yield sum(moved), sum(found), most, gathered
        found.clear()
    dist.all_to_all_single = original


def all_pruned_further():
    return [list(pruned_further(stage)) for stage in (1, 2)]


def test_pruning_further_sends_what_others_hold_from_then_on():
    ranks = run_ranks(all_pruned_further, RANKS)
    for rank in ranks:
        for moved, by_hand, most, gathered in itertools.chain(*rank):
            assert moved == by_hand and most < gathered
    assert sum(one[0] for rank in ranks for one in rank[0]) > 0


def in_groups():
    """A model, its matrices and vectors in groups of their own, and masks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2))
    pairs = list(model.named_parameters())
    groups = [{"params": [p for p in pairs if p[1].dim() > 1]}, {"params": [p for p in pairs if p[1].dim() == 1]}]
    return model, groups, samo.random(model, 0.5, seed=1)


def unlike_ranks():
    """Sentences where ranks differ in what they give."""
    rank, found = dist.get_rank(), {}
    of = partial(samo.Optimizer, group=dist.group.WORLD)

    def tried(name, make):
        try:
            make()
        except ValueError as error:
            found[name] = str(error)

    model, groups, masks = in_groups()
    tried("the same", lambda: of(ADAMW, groups, masks))
    groups[0]["params"] = groups[0]["params"][:: 1 - 2 * rank]
    tried("order", lambda: of(ADAMW, groups))
    groups[0]["params"] = groups[0]["params"][:: 1 - 2 * rank]
    tried("rate", lambda: of(partial(torch.optim.AdamW, lr=0.1 + rank), groups))
    tried("masks", lambda: of(ADAMW, groups, samo.random(model, 0.5, seed=rank)))
    tried("fewer", lambda: of(ADAMW, groups[: 2 - rank]))
    optimizer = of(ADAMW, groups)
    tried("later", lambda: optimizer.prune(samo.random(model, 0.5, seed=rank)))
    optimizer = of(ADAMW, groups)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    steps = []

    def go_on():
        for step in range(6):
            model(torch.randn(3, 5)).square().mean().backward()
            optimizer.step()
            steps.append(step)
            schedule.step(float(2 * step * rank - step))  # of a loss that falls on rank 0, and rises on rank 1

    tried("own losses", go_on)
    assert steps == [0, 1, 2, 3], steps
    return found


class Meeting(torch.autograd.Function):
    """Has ranks meet in backward, as layers that are split over them."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        met = grad.clone()
        dist.all_reduce(met, group=ctx.group)
        return met / 2, None


def sums_beside_calls_of_backward():
    """Ranks that keep more or less of their shards, and sum what they both have, with a call in backward before the shards' gradients."""
    apart, length = dist.new_group([0, 1]), 2**15  # a bucket each
    torch.manual_seed(0)
    model = nn.ParameterDict(
        {name: torch.randn(length, dtype=torch.float64) for name in ("last", "c", "b", "a", "first")}
    )
    common = [model[name] for name in "abc"]
    keeps = torch.ones(length, dtype=torch.bool) if dist.get_rank() else torch.arange(length) < 9
    masks = {"first": keeps, "last": torch.rand(length) < 0.9}
    for stage in (0, 1, 2):
        ranks = lambda one: (dist.group.WORLD if any(one is p for p in common) else None, 2)  # noqa: E731
        optimizer = samo.Optimizer(partial(torch.optim.SGD, lr=0.1), model, masks, group=ranks, stage=stage)
        mean, before = model["first"].detach().sin(), [one.detach().clone() for one in common]
        dist.all_reduce(mean)
        x = Meeting.apply(model["first"].sin(), apart)
        ((model["a"] + model["b"] * 2 + model["c"] * 3) * x).sum().add(model["last"].sum()).backward()
        optimizer.step()
        for times, one, old in zip((1, 2, 3), common, before, strict=True):
            torch.testing.assert_close(one.detach(), old - 0.1 * times * mean / 2)


def written_on_one():
    """Weights that one rank changes past what torch counts, before the first step and behind the fourth."""
    for stage, gather_ahead, steps in ((0, False, 0), (1, True, 4), (2, False, 4)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 2)).bfloat16()
        optimizer = samo.Optimizer(ADAMW, model, group=dist.group.WORLD, stage=stage, gather_ahead=gather_ahead)
        for _ in range(steps):
            model(torch.randn(3, 5).bfloat16()).square().sum().backward()
            optimizer.step()
        if dist.get_rank():
            model[0].weight.data.mul_(2)
        model(torch.randn(3, 5).bfloat16()).square().sum().backward()
        with pytest.raises(
            RuntimeError, match=("another rank .* found a", "'0.weight' was changed by")[dist.get_rank()]
        ):
            optimizer.step()


def two_ranks():
    sums_beside_calls_of_backward()
    written_on_one()
    return unlike_ranks()


def test_ranks_that_lay_gradients_out_otherwise_are_refused():
    for found in run_ranks(two_ranks, 2):
        assert {name: text.partition(";")[0] for name, text in found.items() if "mask of" not in text} == {
            "order": "parameter 0 of those whose gradients are summed is '0.weight' of (5, 5), float32 on rank 0 and '2.weight' of (2, 5), float32 on rank 1",
            "rate": "lr of parameter group 0 is 0.1 on rank 0 and 1.1 on rank 1",
            "own losses": "AdamW has stepped with lr = 0.01 in parameter group 0 on rank 0 and 0.0001 on rank 1, which have parts or replicas of one weight",
            "fewer": "parameter 3 of those whose gradients are summed is '0.bias' of (5,), float32 on rank 0 and not there on rank 1",
        }
        for name in ("masks", "later"):
            assert found[name].startswith("the mask of parameter '0.weight' is of 13 elements, number "), found[name]
            assert found[name].endswith("the same parameters, options and masks, in one order, which a set has not")
