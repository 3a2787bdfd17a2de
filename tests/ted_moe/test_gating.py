"""The gates against DeepSpeed-MoE's."""

import pytest
import torch
from deepspeed.moe.sharded_moe import top1gating, top2gating, topkgating

from ted_moe.gating import Gate, same_on_replicas


def theirs(logits, gate, used_token=None):
    if gate.k == 1:
        return top1gating(
            logits,
            gate.capacity_factor,
            gate.min_capacity,
            used_token,
            drop_tokens=gate.drop_tokens,
            use_rts=False,
            sparse_routes=True,
        )
    if gate.k == 2:
        return top2gating(
            logits,
            gate.capacity_factor,
            gate.min_capacity,
            drop_tokens=gate.drop_tokens,
            top2_2nd_expert_sampling=False,
            sparse_routes=True,
        )
    return topkgating(
        logits, gate.k, gate.capacity_factor, gate.min_capacity, drop_tokens=gate.drop_tokens, sparse_routes=True
    )


LOGITS = {
    "random": lambda generator: torch.randn(29, 6, generator=generator),
    "one expert gets all": lambda generator: (
        torch.randn(29, 6, generator=generator) + torch.tensor([9.0, 0, 0, 0, 0, 0])
    ),
    "an expert gets none": lambda generator: (
        torch.randn(29, 6, generator=generator) - torch.tensor([0, 99.0, 0, 0, 0, 0])
    ),
}


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_equals_deepspeeds(k, kind):
    for seed in range(3):
        for factor, least, drop in ((1.0, 4, True), (0.37, 1, True), (1.3, 11, True), (7.0, 0, True), (1.0, 4, False)):
            gate = Gate(k, factor, factor, least, drop_tokens=drop, use_rts=False, top2_2nd_expert_sampling=False)
            start = LOGITS[kind](torch.Generator().manual_seed(seed))
            for used in (None, (torch.arange(29) % 3 > 0).long()) if k == 1 else (None,):
                mine, other = start.clone().requires_grad_(), start.clone().requires_grad_()
                found = gate(mine, True, used)
                l_aux, capacity, experts, indices, locations, weights, counts = theirs(other, gate, used)
                assert experts == 6 and found.capacity == int(capacity)
                assert torch.equal(found.experts, indices.long())
                there = indices >= 0
                assert torch.equal(found.places[there], locations[there].long())
                assert torch.equal(found.exp_counts, counts)
                torch.testing.assert_close(found.weights, weights, rtol=1e-6, atol=1e-7)
                torch.testing.assert_close(found.l_aux, l_aux, rtol=1e-6, atol=0)
                direction = torch.randn(found.weights.shape, generator=torch.Generator().manual_seed(9))
                ((found.weights * direction).sum() + found.l_aux).backward()
                ((weights * direction).sum() + l_aux).backward()
                torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-7)


def test_slots_are_used_once():
    for k in (1, 2, 3):
        for options in ({}, {"noisy_gate_policy": "RSample"}, {"drop_tokens": False}, {"noisy_gate_policy": "Jitter"}):
            gate = Gate(k, 0.8, min_capacity=2, **options)
            found = gate(torch.randn(50, 5, generator=torch.Generator().manual_seed(k)), True)
            there = found.experts >= 0
            slots = (found.experts * found.capacity + found.places)[there]
            assert len(set(slots.tolist())) == len(slots)
            assert int(found.places[there].max()) < found.capacity
            assert there.all() or gate.drop_tokens


def test_random_numbers_follow_from_the_logits():
    logits = torch.randn(40, 4)
    gate = Gate(1, 0.5, min_capacity=1, noisy_gate_policy="RSample")
    first, again = gate(logits, True), gate(logits.clone(), True)
    other = gate(logits + 1e-3, True)
    assert torch.equal(first.experts, again.experts) and not torch.equal(first.experts, other.experts)
    assert torch.equal(gate(logits, False).weights > 0, Gate(1, 1.0, min_capacity=1)(logits, False).weights > 0)
    draws = torch.rand(4000, generator=same_on_replicas(logits))
    assert abs(float(draws.mean()) - 0.5) < 0.03


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"k": 0}, "k = 0"),
        ({"k": 7}, "k = 7 experts a token, but there are 6"),
        ({"noisy_gate_policy": "Loud"}, "'Loud'"),
        ({"capacity_factor": 0.0}, "capacity_factor = 0.0"),
        ({"eval_capacity_factor": float("nan")}, "eval_capacity_factor = nan"),
    ],
)
def test_wrong_arguments(keywords, message):
    with pytest.raises(ValueError, match=message):
        Gate(**keywords)(torch.randn(29, 6), True)
