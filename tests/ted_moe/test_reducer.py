"""Sums of gradients while backward runs against those behind it, with experts on several ranks."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.checkpoint import checkpoint

import ted_moe
from axonn_plugins.observe.ledger import Ledger
from axonn_plugins.pipeline.bucketed_optimizer import BucketedOptimizer
from axonn_plugins.ted.stock import EXPERTS, FEATURES, Plain, data_tokens, groups_of
from ted_moe import Topology
from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.ted_moe.stock import topologies_of

NEAR = {"rtol": 1e-12, "atol": 1e-12}


class Model(nn.Module):
    """Dense layers around experts, a shift that one rank's tokens alone meet, and a layer that none do."""

    def __init__(self, topology, groups, **options):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.unused = (nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.shift = nn.Parameter(torch.randn(FEATURES))
        self.experts = ted_moe.MoE(FEATURES, Plain(), EXPERTS, topology.expert, groups=groups, k=2, **options)

    def forward(self, tokens, shifts):
        hidden = self.up(tokens)
        hidden = hidden + self.shift if shifts else hidden
        hidden, l_aux, _ = self.experts(hidden.tanh())
        return self.down(hidden).square().mean() + 0.1 * l_aux


OPTIONS = [
    {"top2_2nd_expert_sampling": False, "capacity_factor": 0.8},
    {"top2_2nd_expert_sampling": False, "dropless": True},
]


def compared(ranks):
    """Three steps of two passes each; the last two keep the gradients of the one before, and one pass is checkpointed."""
    for turn, topology in enumerate(topologies_of(ranks)):
        groups = groups_of(topology)
        place = groups.rank("data")
        reference = Model(topology, groups, **OPTIONS[turn % 2]).double()
        model = copy.deepcopy(reference)
        reducer = ted_moe.GradientReducer(model.parameters(), groups, bucket_bytes=600)
        passes = [data_tokens(place, 9 + place, seed).double() for seed in range(6)]
        for step in range(3):
            two = passes[2 * step : 2 * step + 2]
            for tokens in two:
                reference(tokens, place == 0).backward()
            ted_moe.sync_gradients(reference.parameters(), groups)
            with reducer.no_sync():
                model(two[0], place == 0).backward()
            checkpoint(model, two[1].requires_grad_(), place == 0, use_reentrant=bool(step)).backward()
            reducer.finish()
            norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 0.3) for one in (reference, model)]
            torch.testing.assert_close(*norms, **NEAR)
            for (name, wanted), found in zip(reference.named_parameters(), model.parameters(), strict=True):
                assert (wanted.grad is None) == (found.grad is None) == name.startswith("unused"), (topology, name)
                if wanted.grad is not None:
                    torch.testing.assert_close(found.grad, wanted.grad, **NEAR, msg=f"{topology}, step {step}: {name}")
            if not step:
                reference.zero_grad()
                model.zero_grad()


def counted():
    """Bytes of the sums that begin before backward ends, of all, and of the gradients, by axis."""
    groups = groups_of(Topology(4, 1, 2))
    model = Model(groups.topology, groups, **OPTIONS[0]).double()
    del model.unused, model.shift
    reducer = ted_moe.GradientReducer(model.parameters(), groups, bucket_bytes=2**12)
    names = reducer.groups.axis_names()
    tokens = data_tokens(groups.rank("data"), 9, 0)
    for _ in range(2):
        model.zero_grad()
        loss = model(tokens, False)
        with Ledger(names) as ledger:
            loss.backward()
            early = sum(one.elements for one in ledger.collectives if one.axis in ("data", "expert_data"))
            reducer.finish()
    sums = {
        axis: sum(one.elements for one in ledger.collectives if one.axis == axis) for axis in ("data", "expert_data")
    }
    experts = sum(p.numel() for p in model.parameters() if not getattr(p, "allreduce", True))
    return early, sums, {"data": sum(p.numel() for p in model.parameters()) - experts, "expert_data": experts}


@pytest.mark.parametrize("ranks", [4, thorough(8)])
def test_gradients_are_those_of_sums_behind_backward(ranks):
    run_ranks(compared, ranks, ranks)


def test_each_gradient_goes_once_and_most_of_them_while_backward_runs():
    for early, sums, gradients in run_ranks(counted, 4):
        assert sums == gradients
        assert early > sum(sums.values()) / 2


def test_buckets_of_no_bytes_are_refused():
    def refused():
        groups = groups_of(Topology(1))
        with pytest.raises(ValueError, match="bucket_bytes = 0 is less than 1; give bytes"):
            ted_moe.GradientReducer(Model(groups.topology, groups).parameters(), groups, bucket_bytes=0)

    run_ranks(refused, 1)


def overflown():
    """One rank's experts alone have an infinite gradient, then none has."""
    groups = groups_of(Topology(4, 2, 2))
    model = Model(groups.topology, groups, **OPTIONS[0]).double()
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.1),
        ted_moe.TiledOptimizer(lambda some: torch.optim.SGD(some, lr=0.1), model.parameters()),
    ]
    found = []
    for optimizer in optimizers:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for last in (True, False):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            optimizer.zero_grad()
            scaler.scale(model(data_tokens(groups.rank("data"), 9, 0).double(), False)).backward()
            ted_moe.sync_gradients(model.parameters(), groups)
            if last and torch.distributed.get_rank() == 3:
                next(model.experts.local.parameters()).grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
            moved = [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
            found.append((any(moved), scaler.get_scale()))
    return found


def test_an_overflow_in_one_ranks_experts_skips_the_step_on_all():
    assert run_ranks(overflown, 4) == [[(False, 2.0), (True, 2.0)] * 2] * 4


def clipped():
    """Two steps, clipped by torch's norm of the whole model and by optimizers of ours."""
    groups = groups_of(Topology(4, 2, 2))
    for make in (partial(ted_moe.TiledOptimizer, tile_size=100), BucketedOptimizer):
        alone = Model(groups.topology, groups, **OPTIONS[0]).double()
        model = copy.deepcopy(alone)
        stock = torch.optim.SGD(alone.parameters(), lr=0.1)
        ours = make(lambda some: torch.optim.SGD(some, lr=0.1), model.parameters(), max_norm=0.1)
        for seed in range(2):
            for one, optimizer in ((alone, stock), (model, ours)):
                optimizer.zero_grad()
                one(data_tokens(groups.rank("data"), 9, seed).double(), True).backward()
                ted_moe.sync_gradients(one.parameters(), groups)
            norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
            stock.step()
            ours.step()
            assert norm > 0.1
            torch.testing.assert_close(ours.total_norm, norm, **NEAR)
            for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(found, wanted, **NEAR)


def test_tiles_clip_by_the_norm_of_all_ranks_experts():
    run_ranks(clipped, 4)


def stepped_by_matrices():
    """An optimizer whose step of one element depends on its row and column, on experts that are split, and on whole ones."""
    for whole, topology in ((False, Topology(2, 2, 1)), (True, Topology(2, 2, 1, False)), (True, Topology(2, 1, 2))):
        model = Model(topology, groups_of(topology), **OPTIONS[0])
        optimizer = torch.optim.Adafactor(model.parameters())
        model(data_tokens(0, 9, 0).float(), True).backward()
        if whole:
            optimizer.step()
            continue
        for _ in range(2):
            with pytest.raises(
                ValueError, match="Adafactor looks at whole weight matrices, of which a rank has shards"
            ):
                optimizer.step()
        torch.optim.AdamW(model.parameters()).step()


class Together(torch.optim.SGD):
    """Steps by the norm of all gradients."""

    def step(self, closure=None):
        given = [one.grad for one in self.param_groups[0]["params"] if one.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in given]).norm()
        for gradient in given:
            gradient.div_(norm)
        super().step()


def stepped_together():
    """Optimizers that look at all parameters at once, which differ by rank, or are the same on all."""
    for topology in (Topology(2, 1, 2), Topology(2, 2, 1), Topology(2)):
        groups = groups_of(topology)
        model = Model(topology, groups, **OPTIONS[0])
        model(data_tokens(groups.rank("data"), 9, 0).float(), True).backward()
        ted_moe.sync_gradients(model.parameters(), groups)
        for make in (lambda some: torch.optim.LBFGS(some, max_iter=1), lambda some: Together(some, 0.1)):
            optimizer = make(model.parameters())
            with (
                nullcontext()
                if topology == Topology(2)
                else pytest.raises(ValueError, match=f"the optimizer {type(optimizer).__name__} (takes|looks)")
            ):
                optimizer.step(lambda: 0.0)


def test_optimizers_of_whole_matrices_are_refused_where_experts_are_split():
    run_ranks(stepped_by_matrices, 2)


def test_optimizers_of_all_parameters_are_refused_where_experts_differ():
    run_ranks(stepped_together, 2)


def wrapped():
    """Torch's wrapper, which is given experts of several ranks, such a model without them, and experts that are replicas."""
    ddp = nn.parallel.DistributedDataParallel
    for topology in (Topology(2, 1, 2), Topology(2, 2, 1)):
        model = copy.deepcopy(Model(topology, groups_of(topology)))
        with pytest.raises(ValueError, match="whose 'experts.deepspeed_moe.experts.* is an expert's"):
            ddp(model)
        with pytest.raises(
            ValueError, match="fully_shard was given a model of which a parameter of shape .* is an exp"
        ):
            fully_shard(copy.deepcopy(model), mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(
            ValueError, match="FullyShardedDataParallel was given a model of which a parameter of shape"
        ):
            FullyShardedDataParallel(copy.deepcopy(model), device_id=torch.device("cpu"))
        experts = [
            f"experts.{name}" for name, one in model.experts.named_parameters() if not getattr(one, "allreduce", True)
        ]
        ddp._set_params_and_buffers_to_ignore_for_model(model, experts)
        assert ddp(model).module is model
    assert ddp(Model(Topology(2), groups_of(Topology(2)))).module.training


def test_distributed_data_parallel_is_refused_around_experts_of_several_ranks():
    run_ranks(wrapped, 2)
