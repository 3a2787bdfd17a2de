"""Dropless routing against stock DeepSpeed-MoE, which pads every expert to the fullest one's capacity."""

from collections import Counter, defaultdict

import pytest
import torch

import ted_moe
from axonn_plugins.observe.ledger import Ledger
from axonn_plugins.ted.stock import EXPERTS, FEATURES, Gated, Plain, Residual, Single, groups_of
from ted_moe import Topology
from ted_moe.dropless import place_rows, plan_receiving, plan_sending, share_out
from ted_moe.gating import Gate
from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.ted_moe.stock import compare, factorisations, recomputed, topologies_of, wild_tokens

OPTIONS = [
    {"k": 1, "use_rts": False, "drop_tokens": False, "min_capacity": 0},
    {"k": 2, "top2_2nd_expert_sampling": False, "drop_tokens": False, "use_residual": True},
    {"k": 4, "drop_tokens": False},
]
FEW = 4
"""Experts, two on each of two ranks."""
SWITCHES = [{}, {"fused": False}, {"duplicate_token_dropping": False}]


def everywhere(ranks, all_switches):
    """On every topology with all options; options and switches take turns unless all are asked for."""
    found = 0
    for turn, (tensor, expert) in enumerate(factorisations(ranks)):
        for number, options in enumerate(OPTIONS):
            if not all_switches and (number + turn) % 2:
                continue
            kind = (Plain, Gated, Residual, Single)[(number + tensor + expert) % 4]
            of_turn = SWITCHES if all_switches else [SWITCHES[(number + turn) // 2 % len(SWITCHES)]]
            for switches in of_turn if tensor > 1 else SWITCHES[:1]:
                compare(Topology(ranks, tensor, expert), kind, options, switches | {"dropless": True})
                found += 1
            if tensor > 1:
                whole = Topology(ranks, tensor, expert, expert_tensor_parallel=False)
                compare(whole, (Plain, Single)[number % 2], options, {"dropless": True})
    return found


def wild_routing(ranks, switches, turns):
    for place, topology in enumerate(topologies_of(ranks)):
        for options in OPTIONS[place % turns :: turns]:
            compare(topology, Plain, options, switches, wild_tokens)


def counted():
    """Collectives of a forward and a backward, by kind of layer, with the rows that this rank sends and receives."""
    found = {}
    for name, switches in {
        "fused": {},
        "dropped": {"fused": False},
        "plain": {"duplicate_token_dropping": False},
    }.items():
        groups = groups_of(Topology(4, 2, 2))
        layer = ted_moe.MoE(FEATURES, Plain(), FEW, 2, groups=groups, dropless=True, **switches)
        tokens = torch.randn(51, FEATURES, generator=torch.Generator().manual_seed(groups.rank("data")))
        received = []
        layer.local[0].register_forward_pre_hook(
            lambda _, given, received=received: received.append(given[0].shape[-2])
        )
        layer.local[1].register_forward_pre_hook(
            lambda _, given, received=received: received.append(given[0].shape[-2])
        )
        with Ledger(groups.axis_names()) as ledger:
            output, l_aux, counts = layer(tokens.requires_grad_())
            (output.sum() + l_aux).backward()
        calls = defaultdict(list)
        for entry in ledger.entries:
            calls[entry.collective.op, entry.collective.axis].append(entry.collective.elements * entry.itemsize)
        found[name] = dict(calls), sum(received), groups.rank("tensor"), int(counts.sum())
    return found


def checkpointed():
    """Collectives of a checkpointed layer, stashed and not, and whether all gradients are the same."""
    groups = groups_of(Topology(4, 2, 2))
    layer = ted_moe.MoE(FEATURES, Plain(), EXPERTS, 2, k=2, groups=groups, dropless=True)
    return {
        case: (Counter(e.name for e in entries), Counter(e.name for e in entries if e.itemsize == 8))
        for case, entries in recomputed(layer, groups).items()
    }


def test_plans_send_each_row_once():
    logits = torch.randn(29, EXPERTS, generator=torch.Generator().manual_seed(0))
    used = torch.arange(29) % 7 > 0  # the others go nowhere
    routes = Gate(k=1, dropless=True)(logits, True, used)
    table = share_out(routes.exp_counts, 3)
    assert torch.equal(table.sum(0), routes.exp_counts)
    assert int(table.sum(1).max() - table.sum(1).min()) <= 1
    plans = [plan_sending(routes, table, slice(share, share + 1), 4) for share in range(3)]
    slots = plans[0].slots.flatten()
    there = slots[slots < 3 * plans[0].length]
    assert len(there) == len(set(there.tolist())) == int(used.sum())
    assert sum(sum(plan.splits[0]) for plan in plans) == len(there)
    # All that one rank sends to the second of four, as this receives it.
    arriving = table.view(1, 3, 4, 2)[:, :, 1]
    plan = plan_receiving(arriving, 1, torch.device("cpu"))
    assert plan.counts == routes.exp_counts[2:4].tolist() and plan.splits == [plans[1].splits[0][1]]
    assert len(plan.order) == sum(plan.counts) <= 3 * plan.length
    assert not any(plan.full for plan in plans)
    # One share for one expert comes sorted.
    alone = plan_receiving(arriving[:, :1, :1], 0, torch.device("cpu"))
    assert alone.order is None and alone.counts == [int(arriving[0, 0, 0])] == [alone.length]
    everyone = Gate(k=1, dropless=True)(logits, True)
    assert plan_sending(everyone, share_out(everyone.exp_counts, 3), slice(3), 4).full


def test_placing_rows_is_index_copy_and_keeps_none_for_backward():
    rows, order = torch.randn(5, 3, dtype=torch.float64, requires_grad=True), torch.tensor([4, 0, 6, 2, 1])
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        placed = place_rows(rows, order, 8)
    assert torch.equal(placed, torch.zeros(8, 3, dtype=torch.float64).index_copy(0, order, rows))
    assert [saved.is_floating_point() for saved in kept] == [False]
    assert torch.autograd.gradcheck(place_rows, (rows, order, 8))
    assert torch.autograd.gradgradcheck(place_rows, (rows, order, 8))


@pytest.mark.parametrize(
    ("ranks", "all_switches", "cases"), [(4, False, 9), thorough(8, False, 15), thorough(8, True, 66)]
)
def test_equals_stock_on_all_factorisations(ranks, all_switches, cases):
    assert run_ranks(everywhere, ranks, ranks, all_switches)[0] == cases


@pytest.mark.parametrize(("ranks", "turns"), [(4, 2), thorough(8, 1)])
def test_wildly_different_routing_neither_differs_nor_hangs(ranks, turns):
    run_ranks(wild_routing, ranks, ranks, {"dropless": True}, turns)


@pytest.mark.parametrize(("ranks", "turns"), [(4, 3), thorough(8, 1)])
def test_wildly_different_routing_does_not_hang_capacities_either(ranks, turns):
    run_ranks(wild_routing, ranks, ranks, {}, turns)


def test_bytes_on_the_wire():
    row = FEATURES * 4
    for found in run_ranks(counted, 4):
        for name, (calls, received, tensor, routed) in found.items():
            sent = routed if name == "plain" else (routed + 1 - tensor) // 2
            assert calls.pop(("all_reduce", "block")) == [8 * (1 + 2 + 10 * 2)] * 2  # once more where backward begins
            counts, *rows = calls.pop(("all_to_all", "expert"))
            assert counts == rows.pop(2) == 8 * (FEW * (1 if name == "plain" else 2) + 2)
            there, back = rows[0] // row, rows[1] // row
            # Forward there and back, and the mirrors of the second and the first.
            assert rows == [sent * row, back * row, sent * row, back * row] and there == sent
            if name == "plain":
                assert back == received
                assert calls.keys() == {("all_reduce", "tensor")}
                assert sum(calls["all_reduce", "tensor"]) == 2 * received * row
                continue
            assert back <= received
            longest = calls["all_gather", "tensor"][0] // row
            assert received <= 2 * longest < received + 2 * 2  # of each of two ranks at most one row more
            ends = (routed + 1) // 2 * row
            assert calls.pop(("all_gather", "tensor")) == [longest * row, ends, longest * row, ends]
            sums = ("reduce_scatter", "tensor") if name == "fused" else ("all_reduce", "tensor")
            assert calls.keys() == {sums}
            assert sum(calls[sums]) == 2 * (2 * longest if name == "fused" else received) * row


@pytest.mark.thorough  # nor in test_moe.py, in every run
def test_a_recomputation_communicates_nothing():
    for found in run_ranks(checkpointed, 4):
        for (name, stash), (calls, of_counts) in found.items():
            again = 0 if stash else 1
            assert of_counts == {"all_to_all expert": 2 + again, "all_reduce block": 2 + again}, (name, stash)
            assert calls["all_to_all expert"] == 4 + 2 * again + 2 + again, (name, stash)
            assert calls["all_gather tensor"] == 4 + 2 * again, (name, stash)
            assert calls["reduce_scatter tensor"] == 2 + again, (name, stash)
