"""The layer against stock DeepSpeed-MoE with all experts on one rank, which routes each rank's tokens in the same way."""

from collections import Counter, defaultdict
from functools import partial
from itertools import product

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ted_moe
from axonn_plugins.observe.ledger import Ledger
from axonn_plugins.ted.stock import EXPERTS, FEATURES, Gated, Plain, Residual, Single, data_tokens, groups_of
from ted_moe import Topology
from tests.distributed import BACKEND, run_ranks
from tests.matrix import thorough
from tests.ted_moe.stock import CHECKPOINTS, compare, factorisations, topologies_of, wild_tokens

OPTIONS = [
    {"k": 1, "use_rts": False, "capacity_factor": 1.0, "min_capacity": 1},
    {"k": 2, "top2_2nd_expert_sampling": False, "capacity_factor": 0.9, "min_capacity": 3, "use_residual": True},
    {"k": 4, "capacity_factor": 0.7, "min_capacity": 0},
    {"k": 1, "use_rts": False, "drop_tokens": False},
    {"k": 2, "top2_2nd_expert_sampling": False, "drop_tokens": False},
]
SWITCHES = [{}, {"fused": False}, {"duplicate_token_dropping": False}]


def everywhere(ranks, all_switches):
    """On every topology with all options; options and switches take turns unless all are asked for."""
    found = 0
    for turn, (tensor, expert) in enumerate(factorisations(ranks)):
        for number, options in enumerate(OPTIONS):
            if not all_switches and (number + turn) % 3:
                continue
            kind = (Plain, Gated, Residual, Single)[(number + tensor + expert) % 4]
            of_turn = SWITCHES if all_switches else [SWITCHES[(number + turn) // 3 % len(SWITCHES)]]
            for switches in of_turn if tensor > 1 else SWITCHES[:1]:
                compare(Topology(ranks, tensor, expert), kind, options, switches)
                found += 1
        if tensor > 1:
            for kind in (Plain, Single) if all_switches else [(Plain, Single)[turn % 2]]:
                compare(Topology(ranks, tensor, expert, expert_tensor_parallel=False), kind, OPTIONS[1], {})
    return found


def hard_routing(ranks, turns):
    """All tokens of some ranks to one expert, wildly different loads, on every rank another number of tokens kept."""

    def tokens_of(data):
        tokens = data_tokens(data, 21, seed=2)
        return tokens.clone() if data % 2 else tokens[:, :1].repeat(1, 21, 1)

    clipped(ranks)
    for place, topology in enumerate(topologies_of(ranks)[:3]):
        for options in OPTIONS[place % turns :: turns]:
            compare(topology, Plain, options, {}, tokens_of)


def clipped(ranks):
    """Norms by torch's `clip_grad_norm_`, and a dense gradient behind it, against all experts on one rank."""

    def of(groups, ep_size, tokens):
        torch.manual_seed(0)
        expert, settings = Plain(), {"k": 2, "dropless": True, "top2_2nd_expert_sampling": False}
        layer = ted_moe.MoE(FEATURES, expert, EXPERTS, ep_size, groups=groups, use_residual=True, **settings).double()
        for each in tokens:
            output, l_aux, _ = layer(each.double())
            ((output * output.detach().sin()).sum() + l_aux).div(len(tokens)).backward()
        if groups is not None:
            ted_moe.sync_gradients(layer.parameters(), groups)
        norms = [
            torch.nn.utils.clip_grad_norm_(layer.parameters(), most, kind)
            for most, kind in ((1e9, torch.inf), (0.3, 2))
        ]
        return [norm.item() for norm in norms], layer.gate.weight.grad

    for tensor, expert, whole in ((1, ranks, False), (2, ranks // 2, False), (2, ranks, True)):
        topology = Topology(ranks, tensor, expert, expert_tensor_parallel=not whole)
        groups = groups_of(topology)
        mine = of(groups, expert, [data_tokens(groups.rank("data"), 9, seed=4)])
        wanted = of(None, 1, [data_tokens(data, 9, seed=4) for data in range(topology.data)])
        assert mine[0] == pytest.approx(wanted[0], rel=1e-6), topology
        torch.testing.assert_close(*(found[1] for found in (mine, wanted)), rtol=1e-5, atol=1e-7)


def uneven_batches(ranks, all_switches):
    """Another number of tokens on every data rank, down to none, so that each would choose another capacity."""
    for turn, (topology, options) in enumerate(product(topologies_of(ranks), OPTIONS)):
        if ranks == 4 and (turn + turn // len(OPTIONS)) % 2:
            continue
        if options["k"] > 1 or not options.get("drop_tokens", True):
            options = options | {"min_capacity": 0}
        of_turn = SWITCHES if all_switches else [SWITCHES[turn % len(SWITCHES)]]
        for switches in of_turn if topology.tensor == 2 else SWITCHES[:1]:
            compare(topology, Plain, options, switches, wild_tokens)


def counted():
    """(op, axis) -> calls and elements of a forward and a backward, by kind of layer."""
    found = {}
    for name, switches in {
        "fused": {},
        "dropped": {"fused": False},
        "plain": {"duplicate_token_dropping": False},
    }.items():
        groups = groups_of(Topology(8, 2, 4))
        layer = ted_moe.MoE(FEATURES, Plain(), EXPERTS, 4, capacity_factor=0.8, groups=groups, **switches)
        tokens = torch.randn(50, FEATURES).requires_grad_()
        with Ledger(groups.axis_names()) as ledger:
            output, l_aux, _ = layer(tokens)
            (output.sum() + l_aux).backward()
        totals = defaultdict(lambda: (0, 0))
        for each in ledger.collectives:
            calls, elements = totals[each.op, each.axis]
            totals[each.op, each.axis] = calls + 1, elements + each.elements
        found[name] = dict(totals)
    return found


def frozen_elsewhere():
    """Whether a rank's experts have the same gradients where those of the other rank are frozen, and all layers before them."""
    rank, found = dist.get_rank(), []
    for options in ({}, {"k": 2, "drop_tokens": False}, {"dropless": True}):
        gradients = []
        for frozen in (False, True):
            torch.manual_seed(3)
            layer = ted_moe.MoE(FEATURES, Plain(), EXPERTS, 2, groups=groups_of(Topology(2, 1, 2)), **options).double()
            layer.gate.requires_grad_(False)
            layer.local.requires_grad_(not frozen or rank == 1)
            layer(data_tokens(rank))[0].square().sum().backward()
            gradients.append([parameter.grad for parameter in layer.local.parameters()])
        whole, other = gradients
        same = [one is None if rank == 0 else torch.equal(one, two) for one, two in zip(other, whole, strict=True)]
        found.append(all(same) and any(one.any() for one in whole))
    return found


def test_experts_learn_where_those_of_another_rank_are_frozen():
    assert run_ranks(frozen_elsewhere, 2) == [[True] * 3] * 2


def checkpointed():
    """Losses, gradients and collectives with every form of checkpoint, stashed and not."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a kernel that nothing here needs
    deepspeed.init_distributed(BACKEND)
    deepspeed.checkpointing.configure(None)
    groups = groups_of(Topology(4, 2, 2))
    found = {}
    layer = ted_moe.MoE(FEATURES, Plain(), EXPERTS, 2, k=2, groups=groups)
    for name, checkpoint in CHECKPOINTS.items():
        for stash in (None, "device", "cpu"):
            torch.manual_seed(1)
            tokens = torch.randn(16, FEATURES).requires_grad_()
            function = layer if stash is None else ted_moe.Stashing(layer, stash)
            layer.zero_grad()
            with Ledger(groups.axis_names()) as ledger:
                output, l_aux, _ = checkpoint(function, tokens * 1.0)
                kept = stash and function.nbytes
                (output.square().sum() + l_aux).backward()
            grads = [tokens.grad, *(parameter.grad.clone() for parameter in layer.parameters())]
            ops = Counter((each.op, each.axis) for each in ledger.collectives)
            found[name, stash] = grads, ops, kept, stash and function.nbytes
    wanted = found["reentrant", None][0]
    for grads, _, _, _ in found.values():
        for mine, theirs in zip(grads, wanted, strict=True):
            torch.testing.assert_close(mine, theirs)
    return {key: value[1:] for key, value in found.items()}


def test_bytes_on_the_wire():
    slots = EXPERTS * 6 * FEATURES  # 0.8 · 50 / 8 = 5 slots, and one of padding
    unpadded = EXPERTS * 5 * FEATURES
    for found in run_ranks(counted, 8):
        for calls in found.values():
            # The capacity, the mixture, and five numbers of each of four tensor groups, these and it with their negatives; where
            # backward begins, once more.
            assert calls.pop(("all_reduce", "block")) == (2, 2 * (1 + 2 + 10 * 4))
        # The last all-gather and the mirror of the drop; the gather to the experts and the mirror of the last drop.
        gathers = {("all_gather", "tensor"): (4, 4 * slots // 2)}
        assert found["plain"].pop(("all_to_all", "expert")) == (4, 4 * unpadded)
        assert found["plain"] == {("all_reduce", "tensor"): (4, 2 * unpadded)}
        assert found["dropped"].pop(("all_to_all", "expert")) == (4, 4 * slots // 2)
        assert found["dropped"] == {("all_reduce", "tensor"): (4, 2 * slots)} | gathers
        assert found["fused"].pop(("all_to_all", "expert")) == (4, 4 * slots // 2)
        # A reduce-scatter sends half of what an all-reduce does.
        assert found["fused"] == {("reduce_scatter", "tensor"): (2, 2 * slots)} | gathers


def test_a_recomputation_communicates_nothing():
    for found in run_ranks(checkpointed, 4):
        for (name, stash), (ops, kept, left) in found.items():
            recomputed = 0 if stash else 1
            assert ops["all_to_all", "expert"] == 4 + 2 * recomputed, (name, stash)
            assert ops["all_reduce", "block"] == 2 + recomputed, (name, stash)  # one where backward begins
            assert ops["all_gather", "tensor"] == 4 + 2 * recomputed, (name, stash)
            assert ops["reduce_scatter", "tensor"] == 2 + recomputed, (name, stash)
            if stash:
                slots = EXPERTS * 4 * FEATURES * 4  # bytes
                assert kept == 2 * slots + 3 * slots // 2 + 8 * (3 + 10 * 2) and left == 0, (name, stash)


@pytest.mark.parametrize(
    ("ranks", "all_switches", "cases"), [(4, False, 10), thorough(8, False, 17), thorough(8, True, 110)]
)
def test_equals_stock_on_all_factorisations(ranks, all_switches, cases):
    assert run_ranks(everywhere, ranks, ranks, all_switches)[0] == cases


@pytest.mark.parametrize(("ranks", "turns"), [(4, 2), thorough(8, 1)])
def test_hard_routing_neither_differs_nor_hangs(ranks, turns):
    run_ranks(hard_routing, ranks, ranks, turns)


@pytest.mark.parametrize(("ranks", "all_switches"), [(4, False), thorough(8, False), thorough(8, True)])
def test_uneven_batches_neither_differ_nor_hang(ranks, all_switches):
    run_ranks(uneven_batches, ranks, ranks, all_switches)


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"num_experts": 3, "ep_size": 2}, "ep_size = 2 does not divide num_experts = 3"),
        ({"num_experts": 4, "ep_size": 2}, "ep_size = 2 needs process groups"),
        ({"k": 9}, "k = 9 experts a token"),
    ],
)
def test_wrong_arguments(keywords, message):
    with pytest.raises(ValueError, match=message):
        ted_moe.MoE(FEATURES, Plain(), **keywords)(torch.randn(16, FEATURES))


def compiled():
    """A layer between compiled ones, and the same eagerly."""
    found = []
    for run in (lambda model: model, partial(torch.compile, backend="eager")):
        groups = groups_of(Topology(2, 1, 2))
        torch.manual_seed(0)
        layer = ted_moe.MoE(FEATURES, Plain(), EXPERTS, 2, k=2, groups=groups).double()
        model = torch.nn.Linear(FEATURES, FEATURES).double()
        torch.manual_seed(dist.get_rank())
        tokens = torch.randn(16, FEATURES, dtype=torch.float64, requires_grad=True)
        call = run(lambda given, model=model, layer=layer: model(layer(model(given))[0]).square().sum())
        call(tokens).backward()
        found.append([tokens.grad, *(p.grad for p in [*model.parameters(), *layer.parameters()])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_what_is_around_a_mixture_may_be_compiled():
    run_ranks(compiled, 2)
