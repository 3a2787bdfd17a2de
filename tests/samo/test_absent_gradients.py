"""Ranks whose backward passes bring them less than others', or nothing: what some ranks miss is zero there, and collectives still pair."""

import itertools
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import samo
from tests.distributed import run_ranks
from tests.samo.test_stages import distance, local, optimizer_of, pairs, whole

RANKS = 4
PASSES = (
    [((), ()), ((0,), (0, 1)), ((1,), ()), ((0, 1), (2,))],  # rank 0 has nothing, rank 2 only in its first pass
    [((0, 1, 2), (1,)), ((2,), (0,)), ((), ()), ((), (0, 1, 2))],
    [((), ()), ((), ()), ((), ()), ((), ())],  # nobody has: weights stay, moments too
    [((0,), (1,)), ((0, 1), (0, 1)), ((2,), (2,)), ((), (0,))],
    [((0,), ()), ((0,), (0,)), ((), ()), ((1,), ())],  # the first expert and the last part have none on any rank
)
"""Of each step, rank and pass: the parts of the model that have gradients."""
MOMENTUM = partial(torch.optim.SGD, lr=1e-2, momentum=0.9, weight_decay=0.1)


def loss_of(model: nn.Module, step: int, rank: int, micro: int, expert: int) -> torch.Tensor | None:
    """Of the parts that a pass reaches; None where there are none."""
    parts = PASSES[step][rank][micro]
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(100 * step + 10 * rank + micro), dtype=torch.float64)
    shares = [
        lambda: model.up(x).square().mean(),
        lambda: model.experts[expert](torch.cat([x, x], 1)[:, :13]).square().mean(),
        lambda: model.down(torch.cat([x, x], 1)[:, :13]).square().mean() * model.scale.sum(),
    ]
    return sum(shares[part]() for part in parts) if parts else None


def reference() -> dict[str, torch.Tensor]:
    """The whole model, by torch's own optimizer: it passes over parameters of which nobody has a gradient."""
    model, _ = whole()
    optimizer = MOMENTUM(model.parameters())
    for step in range(len(PASSES)):
        optimizer.zero_grad()
        for rank, micro in itertools.product(range(RANKS), range(2)):
            if (loss := loss_of(model, step, rank, micro, rank % 2)) is not None:
                (loss / RANKS).backward()
        optimizer.step()
    return dict(model.named_parameters())


def absent() -> dict[tuple[int, bool], float]:
    rank, groups = dist.get_rank(), pairs()
    expected, found = reference(), {}
    for stage, every in itertools.product((0, 1, 2), (False, True)):
        model, _ = whole()
        mine, named = local(model, rank % 2)
        optimizer = optimizer_of(MOMENTUM, named, None, groups[rank % 2], stage=stage, norm=None)
        for step in range(len(PASSES)):
            for micro in range(2):
                loss = loss_of(mine, step, rank, micro, rank % 2)
                with optimizer.no_sync() if micro == 0 and not every else nullcontext():
                    if loss is not None:
                        loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found[stage, every] = distance(named, expected)
    return found


def test_what_a_rank_does_not_have_is_zero() -> None:
    for found in run_ranks(absent, RANKS):
        assert len(found) == 6 and max(found.values()) < 1e-12, found


def passes_end() -> list[float]:
    """As DeepSpeed calls it: sums behind each pass, in which one rank has nothing."""
    rank, weights = dist.get_rank(), []
    for stage in (0, 1, 2):
        torch.manual_seed(0)
        model = nn.Linear(3, 2, bias=False, dtype=torch.float64)
        optimizer = samo.Optimizer(partial(torch.optim.SGD, lr=1.0), model, group=dist.group.WORLD, stage=stage)
        before = model.weight.detach().clone()
        for micro in range(3):
            if (rank + micro) % 3:
                model(torch.full((1, 3), float(10**micro), dtype=torch.float64)).sum().backward()
            optimizer.reducer.end_pass()
        optimizer.step()
        weights.append(float((before - model.weight)[0, 0]))
    return weights


def test_passes_that_end_on_every_rank() -> None:
    expected = sum(10**micro for rank in range(RANKS) for micro in range(3) if (rank + micro) % 3) / RANKS
    for found in run_ranks(passes_end, RANKS):
        assert found == [expected] * 3
