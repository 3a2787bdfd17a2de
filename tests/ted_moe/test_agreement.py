"""Tensor ranks that were not given the same tokens: a sentence on every rank that would wait for them."""

from itertools import product

import pytest
import torch

import ted_moe
from axonn_plugins.ted.stock import EXPERTS, FEATURES, Plain, groups_of
from ted_moe import Topology
from ted_moe.agreement import answer, projections, question
from tests.distributed import run_ranks
from tests.matrix import thorough

TOPOLOGIES = {
    4: [Topology(4, 2, 1), Topology(4, 2, 2, False)],
    8: [
        Topology(8, 2, 2),
        Topology(8, 2, 4),
        Topology(8, 4, 1),
        Topology(8, 2, 4, False),
        Topology(8, 4, 2, False),
    ],
}
"""By ranks."""
MODES = {
    "capacities": {"k": 2},
    "no token dropped": {"k": 1, "drop_tokens": False},
    "dropless": {"k": 2, "dropless": True},
    "plain": {"k": 1, "duplicate_token_dropping": False},
}
WRONG = {4: 3, 8: 5}  # the rank that is given other tokens


def attempt(layer, tokens):
    try:
        output, l_aux, _ = layer(tokens)
    except ValueError as error:
        return str(error)
    (output.sum() + l_aux).backward()
    return "went on"


def unequal(ranks):
    """Error of each mode on one token more on one rank, and on as many others, after a step that was right."""
    found = {}
    for topology, (name, options) in product(TOPOLOGIES[ranks], MODES.items()):
        groups = groups_of(topology)
        torch.manual_seed(0)
        layer = ted_moe.MoE(FEATURES, Plain(), EXPERTS, topology.expert, groups=groups, **options)
        tokens = torch.randn(12, FEATURES, generator=torch.Generator().manual_seed(groups.rank("data")))
        wrong = torch.distributed.get_rank() == WRONG[ranks]
        found[topology, name] = [
            attempt(layer, tokens),
            attempt(layer, torch.cat([tokens, tokens[:1]]) if wrong else tokens),
            attempt(layer, -tokens if wrong else tokens),
            attempt(layer, tokens.flip(0) if wrong else tokens),
        ]
    return found


UNLIKE = {
    "overlap_degree": ({"overlap_degree": 2}, "overlap_degree is 1 on rank 0 and 2 on rank 3; give all ranks the same"),
    "dropless": ({"dropless": True}, "dropless is False on rank 0 and True on rank 3"),
    "capacity": ({"capacity_factor": 1.5}, "capacity_factor is 1.0 on rank 0 and 1.5 on rank 3"),
    "dropping": ({"duplicate_token_dropping": False}, "duplicate_token_dropping is True on rank 0 and False on rank 3"),
    "experts": ({"num_experts": 2 * EXPERTS}, f"num_experts is {EXPERTS} on rank 0 and {2 * EXPERTS} on rank 3"),
    "expert": ({"expert": torch.nn.Linear(FEATURES, FEATURES)}, "expert is Plain on rank 0 and Linear on rank 3"),
    "mistake": ({"k": 0}, "k = 0 sends a token to no expert; use 1 or more"),
    "other mistake": ({"num_experts": EXPERTS + 1}, f"does not divide num_experts = {EXPERTS + 1}"),
}


def made_unlike():
    """Sentences where the last rank makes a mixture in another way."""
    found = {}
    for topology in (Topology(4, 2, 2), Topology(4, 1, 4), Topology(4, 2, 4, False)):
        groups = groups_of(topology)
        for name, (own, _) in UNLIKE.items():
            options = {"expert": Plain(), "num_experts": EXPERTS} | (own if torch.distributed.get_rank() == 3 else {})
            with pytest.raises(ValueError) as raised:
                ted_moe.MoE(FEATURES, ep_size=topology.expert, groups=groups, **options)
            found[topology, name] = str(raised.value)
    return found


def test_mixtures_that_ranks_make_in_other_ways_are_a_sentence_on_all():
    for found in run_ranks(made_unlike, 4):
        for (topology, name), said in found.items():
            assert UNLIKE[name][1] in said and "\n" not in said, (topology, name, said)


def test_maxima_of_questions():
    asked = [question(7, (12, 3), 0, 3), question(9, (20, 5), 1, 3), question(8, (1, 2), 2, 3)]

    def maxima(*more):
        return [max(column) for column in zip(*asked, *more, strict=True)]

    assert answer(maxima(), 3) == (9, None)
    assert answer(maxima(question(10, (19, 5), 1, 3)), 3) == (10, (1, 0, 19, 20))
    assert answer(maxima(question(10, (1, 4), 2, 3)), 3) == (10, (2, 1, 2, 4))
    assert answer([6, 0, 0], 3) == (6, None)
    assert answer([max(pair) for pair in zip(question(1, (), 0, 1, 5), question(2, (), 0, 1, 7), strict=True)], 1) == (
        2,
        (-1, 0, 5, 7),
    )


def test_projections_are_ordered_and_found_apart_but_for_rounding():
    rows = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    for other, alike in ((rows * (1 + 1e-5), True), (rows.flip(0), False), (rows.roll(1, 1), False), (-rows, False)):
        asked = [question(1, projections(tokens), 0, 1) for tokens in (rows, other)]
        assert (answer([max(pair) for pair in zip(*asked, strict=True)], 1, rough=3)[1] is None) == alike
    assert projections(torch.full((3, 2), float("nan"))) == [0, 0, 0]
    assert projections(torch.zeros(0, 4)) == [0, 0, 0]


def seeded_apart():
    """A layer whose tensor ranks were seeded differently, with lots drawn for experts and for room."""
    topology = Topology(4, 2, 2)
    groups = groups_of(topology)
    found = []
    for options in (
        {"k": 1},
        {"k": 2},
        {"k": 1, "noisy_gate_policy": "RSample"},
        {"k": 1, "noisy_gate_policy": "Jitter"},
    ):
        torch.manual_seed(10 + torch.distributed.get_rank())
        layer = ted_moe.MoE(FEATURES, Plain(), EXPERTS, 2, groups=groups, capacity_factor=0.5, **options)
        torch.manual_seed(20 + torch.distributed.get_rank())
        tokens = torch.randn(12, FEATURES, generator=torch.Generator().manual_seed(groups.rank("data")))
        found.append((layer(tokens)[0].tolist(), layer(-tokens)[0].tolist()))
    return found


def test_tensor_ranks_that_were_seeded_apart_draw_the_same():
    a, b, c, d = run_ranks(seeded_apart, 4)
    assert a == b and c == d and a != c


@pytest.mark.parametrize("ranks", [4, thorough(8)])
def test_a_sentence_on_every_rank_that_would_wait(ranks):
    everyone = run_ranks(unequal, ranks, ranks)
    for topology, name in product(TOPOLOGIES[ranks], MODES):
        waiting = topology.block_group(WRONG[ranks])
        first = topology.tensor_group(WRONG[ranks])
        start = f"ranks {first[0]} to {first[-1]} are one tensor group and were given "
        for rank, found in enumerate(everyone):
            right, longer, other, turned = found[topology, name]
            assert right == "went on", (rank, topology, name, right)
            counts = start + "12 to 13 tokens; give the ranks of a tensor group the same tokens"
            assert longer == (counts if rank in waiting else "went on"), (rank, topology, name, longer)
            for message in (other, turned):
                said = message.startswith(start + "as many tokens") and "same tokens" in message
                assert said if rank in waiting else message == "went on", (rank, topology, name, message)
