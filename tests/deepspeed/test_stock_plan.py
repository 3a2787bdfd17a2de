"""Where stock DeepSpeed-MoE keeps optimizer states: arithmetic, no processes."""

from __future__ import annotations

import random

import pytest
import torch
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from axonn_plugins.hosts.deepspeed.checkpoint.stock_plan import Flat, Group, renumbered, stock_groups

EXPERTS = "moe.deepspeed_moe.experts.deepspeed_experts."


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("alignment", [1, 4])
def test_partitions_hold_every_element_once(count: int, alignment: int) -> None:
    random.seed(count)
    sizes = [random.choice([1, 2, 5, 16, 33]) for _ in range(7)]
    flat = Flat.aligned(sizes, count, alignment)
    whole = [torch.randn(size) for size in sizes]
    partitions = [torch.full((flat.size,), torch.nan) for _ in range(count)]
    for number, partition in enumerate(partitions):
        for place, start, length, at in flat.pieces(number):
            assert partition[at : at + length].isnan().all()
            partition[at : at + length] = whole[place][start : start + length]
    assert flat.size % 2 == 0 and all(offset % alignment == 0 for offset in flat.offsets)
    held = [partition[: flat.size - flat.padding(n)] for n, partition in enumerate(partitions)]
    # What is left out is the end, and nothing but gaps is in between.
    assert sum(part.isnan().sum().item() for part in held) == sum(flat.gaps)
    assert sum(part.numel() for part in held) == flat.used
    for place, tensor in enumerate(whole):
        found = [partitions[number][at : at + n] for number, at, n in flat.places(place)]
        torch.testing.assert_close(torch.cat(found), tensor, rtol=0, atol=0)


@pytest.mark.parametrize("largest", [10**6, 30, 20])
def test_groups_are_those_that_deepspeed_makes(largest: int) -> None:
    names = ["a", f"{EXPERTS}0.w", f"{EXPERTS}0.b", "b", f"{EXPERTS}1.w", f"{EXPERTS}1.b"]
    parameters = {name: nn.Parameter(torch.zeros(16 if name.endswith("w") else 4)) for name in names}
    for name, parameter in parameters.items():
        if name.startswith(EXPERTS):
            parameter.allreduce, parameter.group_name = False, "ep_size_2"  # type: ignore[attr-defined]
    sources = [names[:4], names[4:] + ["c"]]
    parameters["c"] = nn.Parameter(torch.zeros(3))
    groups = [{"params": [parameters[n] for n in source], "name": str(place)} for place, source in enumerate(sources)]
    made = split_params_into_different_moe_groups_for_optimizer(groups, max_group_size=largest)
    known = {id(parameter): name for name, parameter in parameters.items()}
    expected = [tuple(known[id(p)] for p in group["params"]) for group in made]
    numel = {name: parameter.numel() for name, parameter in parameters.items()}
    assert [group.names for group in stock_groups(sources, numel, largest)] == expected


def test_groups_that_a_script_has_sorted_stay() -> None:
    sources = [[f"{EXPERTS}0.w"], ["a", "b"]]
    assert stock_groups(sources, {}) == [Group(0, (f"{EXPERTS}0.w",)), Group(1, ("a", "b"))]


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_round_robin_is_deepspeeds(count: int) -> None:
    names = tuple("abcdefg")
    expected, _ = DeepSpeedZeroOptimizer._round_robin_reorder(None, list(names), count)
    assert Group(0, names).dealt(count).names == tuple(expected)


def test_experts_of_a_rank_are_numbered_anew() -> None:
    names = [
        "a",
        f"{EXPERTS}0.w",
        f"{EXPERTS}0.b",
        f"{EXPERTS}1.w",
        f"{EXPERTS}1.b",
        "b",
        f"{EXPERTS}0.x",
        f"{EXPERTS}1.x",
    ]
    one = ["a", f"{EXPERTS}0.w", f"{EXPERTS}0.b", "b", f"{EXPERTS}0.x"]
    assert renumbered(names, {EXPERTS: 1}) == one
    assert renumbered(one, {EXPERTS: 2}) == names
