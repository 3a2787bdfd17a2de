"""3D PMM equals the serial model on every factorisation of 1, 2, 4 and 8 ranks, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import axonn_tp
from axonn_tp import LayerPlan, Mesh, factorisations, layout_of
from recipes.models.gpt import GPT, GPTConfig
from tests.distributed import run_ranks

TOLERANCE = 1e-10
WORLDS = (1, 2, 4, 8)


def gpt_plan(heads: int) -> dict[str, LayerPlan]:
    return {
        "tokens": LayerPlan("embedding"),
        "positions": LayerPlan("embedding"),
        "*.ln?": LayerPlan("norm"),
        "norm": LayerPlan("norm"),
        "*.qkv": LayerPlan("normal", parts=3, heads=heads),
        "*.proj": LayerPlan("transposed"),
        "*.fc1": LayerPlan("normal"),
        "*.fc2": LayerPlan("transposed"),
        "head": LayerPlan("head"),
        "loss": LayerPlan("loss"),
    }


def whole(parameter: torch.Tensor, value: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The serial tensor from every rank's share of it."""
    shares = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, value.contiguous())
    return layout_of(parameter).assemble(shares, mesh.grid)


def largest_error(
    serial: nn.Module, parallel: nn.Module, mesh: Mesh, of: Callable[[nn.Parameter], torch.Tensor | None]
) -> float:
    error = 0.0
    ours = dict(parallel.named_parameters())
    for name, parameter in serial.named_parameters():
        expected, got = of(parameter), of(ours[name])
        assert (expected is None) == (got is None), name
        if expected is not None and got is not None:
            error = max(error, (whole(ours[name], got, mesh) - expected).abs().max().item())
    return error


def train_one_step(
    build: Callable[[], nn.Module], plan: dict[str, LayerPlan], run: Callable, batch: tuple, mesh: Mesh
) -> dict[str, float]:
    """Errors of output loss, gradients, norm and the weights after one AdamW step against the serial model."""
    torch.manual_seed(7)
    serial = build().double()
    parallel = axonn_tp.parallelize(copy.deepcopy(serial), mesh, plan)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1) for model in (serial, parallel)]
    expected = run(serial, *batch)
    expected.backward()
    mine = run(parallel, *(mesh.shard_batch(tensor) for tensor in batch))
    mine.backward()
    axonn_tp.sync_gradients(parallel.parameters(), mesh)
    loss = mine.detach().clone()
    dist.all_reduce(loss, group=mesh.group("batch"))
    errors = {
        "loss": (loss / mesh.grid.batch - expected).abs().item(),
        "gradients": largest_error(serial, parallel, mesh, lambda p: p.grad),
    }
    norm = axonn_tp.clip_grad_norm_(parallel.parameters(), mesh, 0.5)
    errors["norm"] = (norm - nn.utils.clip_grad_norm_(serial.parameters(), 0.5)).abs().item()
    for optimizer in optimizers:
        optimizer.step()
    errors["weights"] = largest_error(serial, parallel, mesh, lambda p: p.data)
    return errors


def gpt_on_grids(config: GPTConfig) -> dict[str, dict[str, float]]:
    torch.manual_seed(3)
    ids = torch.randint(config.vocabulary, (8, config.context + 1))
    found = {}
    for grid in factorisations(dist.get_world_size()):
        mesh = Mesh(grid)
        plan = gpt_plan(config.heads)
        found[str(grid)] = train_one_step(
            lambda: GPT(config), plan, lambda model, ids: model(ids[:, :-1], ids[:, 1:]), (ids,), mesh
        )
    return found


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("tied", [False, True])
def test_gpt(ranks: int, tied: bool) -> None:
    config = GPTConfig(vocabulary=250, context=6, layers=2, heads=24, hidden=96, tied=tied)
    for grids in run_ranks(gpt_on_grids, ranks, config):
        for grid, errors in grids.items():
            assert max(errors.values()) < TOLERANCE, (grid, errors)
