"""Experts as one grouped matmul against one expert after another."""

import copy

import pytest
import torch

from axonn_plugins.ted.stock import FEATURES, Gated, Plain, Residual, Single
from axonn_tp import LayerPlan
from ted_moe import grouped
from ted_moe.experts import ExpertPlan, split_expert
from ted_moe.moe import Alone

COUNTS = [5, 0, 9, 2]
SPLIT = {"fc1": LayerPlan("normal"), "fc2": LayerPlan("transposed")}


def gradients(experts, rows, output):
    wanted = [rows, *(parameter for expert in experts for parameter in expert.parameters())]
    return torch.autograd.grad(output.square().sum(), wanted)


@pytest.mark.parametrize(
    "kind, plan",
    [
        (Plain, ExpertPlan({})),
        (Gated, ExpertPlan({})),
        (Plain, ExpertPlan(SPLIT)),
        (Plain, ExpertPlan(SPLIT, fused=True)),
    ],
)
def test_together_is_one_after_another(kind, plan):
    torch.manual_seed(0)
    experts = [kind() for _ in COUNTS]
    for expert in experts:
        split_expert(expert, plan, Alone())
    rows = torch.randn(sum(COUNTS), FEATURES, requires_grad=True)
    assert grouped.groupable(experts)
    before = copy.copy(experts[0].__dict__["_modules"])
    mine = grouped.together(experts, COUNTS, rows.device)(rows)
    theirs = grouped.run(experts, rows, COUNTS)
    torch.testing.assert_close(mine, theirs)
    for one, other in zip(gradients(experts, rows, mine), gradients(experts, rows, theirs), strict=True):
        torch.testing.assert_close(one, other)
    assert experts[0]._modules == before


def test_what_is_not_linears_alone_stays_apart():
    assert not grouped.groupable([Residual()]) and not grouped.groupable([Single()])
    hooked = Plain()
    hooked.fc1.register_forward_hook(lambda *_: None)
    assert not grouped.groupable([Plain(), hooked])
    assert grouped.groupable([Plain()], alignment=16) and not grouped.groupable([Plain().bfloat16()], alignment=16)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's grouped matmul is used on GPUs alone")
def test_on_a_gpu():
    torch.manual_seed(0)
    experts = [torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)) for _ in COUNTS]
    experts = [expert.cuda().bfloat16() for expert in experts]
    rows = torch.randn(sum(COUNTS), 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert grouped._fast(rows) and grouped.groupable(experts, alignment=16)
    mine = grouped.run(experts, rows, COUNTS)
    theirs = torch.cat([expert(part) for expert, part in zip(experts, rows.split(COUNTS), strict=True)])
    torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    for one, other in zip(gradients(experts, rows, mine), gradients(experts, rows, theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)
