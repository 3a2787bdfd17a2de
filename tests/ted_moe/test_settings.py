"""Settings that nobody chose: drawn ones beside stock DeepSpeed-MoE, and noisy gates, which stock draws anew on every rank."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ted_moe
from axonn_plugins.ted.stock import (
    FEATURES,
    Comparison,
    Gated,
    Plain,
    Residual,
    Single,
    data_tokens,
    differences,
    groups_of,
)
from ted_moe import Topology
from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.ted_moe.stock import BAR

TOPOLOGIES = [Topology(4, 1, 4), Topology(4, 2, 2), Topology(4, 4, 1), Topology(4, 2, 1), Topology(4, 1, 2)]
TOPOLOGIES += [Topology(4, 2, expert, expert_tensor_parallel=False) for expert in (2, 4)]
NOISES = list(itertools.product((torch.float32, torch.bfloat16), (1, 2, 3), ("RSample", "Jitter"), (True, False)))
IN_TURN = [
    (torch.float32, 1, "RSample", True),
    (torch.bfloat16, 2, "RSample", False),
    (torch.bfloat16, 3, "Jitter", True),
    (torch.float32, 2, "Jitter", False),
    (torch.bfloat16, 1, "Jitter", True),
    (torch.float32, 3, "RSample", False),
]
"""Each type, policy and draw of lots with two or three numbers of experts a token, and once among the first three."""


def alike(count: int, data: int) -> Tensor:
    """All tokens of every second data rank are the same."""
    tokens = data_tokens(data, count, seed=2)
    return tokens if data % 2 else tokens[:, :1].repeat(1, count, 1)


def growing(count: int, data: int) -> Tensor:
    """Every data rank has more tokens than the one before."""
    return data_tokens(data, count + 3 * data, seed=3)


def drawn(draw: random.Random) -> Comparison:
    """From one expert a rank on, capacities from nothing to more than there are tokens, more choices than local experts."""
    topology, k = draw.choice(TOPOLOGIES), draw.choice([1, 1, 2, 2, 3, 4, 5])
    experts = topology.expert * max(draw.choice([1, 2, 3]), -(-k // topology.expert))
    options: dict[str, Any] = {
        "k": k,
        "capacity_factor": draw.choice([0.1, 0.37, 1.0, 1.13, 9.3]),
        "eval_capacity_factor": draw.choice([0.3, 1.7, 5.0]),
        # Stock DeepSpeed's top-1 wants as many tokens.
        "min_capacity": draw.choice([0, 0, 1] if k == 1 else [0, 0, 1, 7]),
        "use_residual": draw.random() < 0.3,
        "drop_tokens": draw.random() < 0.6,
        "use_rts": False,
        "top2_2nd_expert_sampling": False,
    }
    switches = [{}, {}, {"fused": False}, {"duplicate_token_dropping": False}]
    if not options["drop_tokens"]:
        switches.append({"dropless": True})
    kind = partial(draw.choice([Plain, Gated, Residual, Single]), draw.choice([8, 16, 24]))
    tokens = partial(draw.choice([alike, growing]), draw.choice([1, 2, 3, 13, 40]))
    return Comparison(topology, kind, options, draw.choice(switches), tokens, experts, training=draw.random() < 0.6)


def settings(count: int) -> None:
    draw = random.Random(5)
    for case in [drawn(draw) for _ in range(count)]:
        found = differences(case)
        # Gates are in float32, and of a few tokens their gradient is what is left of terms that cancel.
        assert found.pop("gate gradient") <= 10 * BAR, case
        assert max(found.values()) <= BAR, (found, case)


def noisy(noises: list[tuple[Any, ...]]) -> None:
    """Tensor ranks get the same bits, and so does a recomputation."""
    groups = groups_of(Topology(4, 2, 2))
    for dtype, k, policy, lots in noises:
        case = dtype, k, policy, lots
        layer = ted_moe.MoE(
            FEATURES, Plain(), 4, 2, k=k, noisy_gate_policy=policy, use_rts=lots, min_capacity=0, groups=groups
        )
        layer.to(dtype)
        layer.gate.float()
        tokens = data_tokens(groups.rank("data"), 17).to(dtype)
        outcomes = []
        for function in (layer, partial(checkpoint, ted_moe.Stashing(layer), use_reentrant=False)):
            layer.zero_grad()
            inputs = tokens.clone().requires_grad_()
            output, l_aux, _ = function(inputs)
            (output.float().square().sum() + l_aux).backward()
            assert inputs.grad is not None
            gate = layer.gate.weight.grad
            assert gate is not None
            outcomes.append([output.detach(), l_aux.detach(), inputs.grad, gate.clone()])
        for first, second in zip(*outcomes, strict=True):
            assert first.isfinite().all(), case
            assert torch.equal(first, second), case
        for value in outcomes[0]:
            beside = [torch.empty_like(value) for _ in range(2)]
            dist.all_gather(beside, value.contiguous(), group=groups.group("tensor"))
            assert torch.equal(*beside), case


@pytest.mark.parametrize("count", [12, thorough(60)])
def test_drawn_settings_equal_stock(count: int) -> None:
    run_ranks(settings, 4, count)


@pytest.mark.parametrize("noises", [IN_TURN[:3], thorough(NOISES)], ids=len)
def test_noise_is_the_same_on_tensor_ranks_and_when_recomputed(noises: list[tuple[Any, ...]]) -> None:
    run_ranks(noisy, 4, noises)
