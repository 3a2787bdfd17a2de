"""autocast and GradScaler in plain PyTorch loops, beside the serial model under torch's own."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import axonn_tp
from axonn_plugins.observe.ledger import Ledger
from axonn_recipes.models.gpt import GPT, GPTConfig
from axonn_tp import Grid, LayerPlan, Mesh, Options, place
from axonn_tp.comm.same_on_replicas import leave_to_host
from tests.axonn_tp.test_grids import gpt_plan, largest_error, whole
from tests.distributed import run_ranks
from tests.matrix import thorough

CONFIG = GPTConfig(vocabulary=32, context=4, layers=1, heads=4, hidden=16)
PLAN = {"0": LayerPlan("normal"), "2": LayerPlan("transposed")}
STEPS, OVERFLOW = 5, 2


def relative(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    off = sum((found[name] - value).square().sum() for name, value in exact.items())
    return (off / sum(value.square().sum() for value in exact.values())).sqrt().item()


def autocast_pass(grid: Grid, options: Options) -> tuple[dict[str, float], list, list]:
    """Errors of serial and parallel gradients; the collectives with bytes of an element, seen and expected."""
    torch.manual_seed(2)
    mesh, serial = Mesh(grid), GPT(CONFIG)
    ids = torch.randint(CONFIG.vocabulary, (8, CONFIG.context + 1))
    exact, parallel = copy.deepcopy(serial).double(), copy.deepcopy(serial)
    placements = place(parallel, grid, gpt_plan(CONFIG.heads), options)
    rows = 8 // grid.batch * CONFIG.context
    expected = []
    for placement in placements:
        # What torch's autocast does: products in bfloat16, look-ups, norms and the loss in float32.
        dtype = torch.bfloat16 if placement.kind in ("normal", "transposed", "head") else torch.float32
        for made in placement.collectives(CONFIG.context if placement.name == "positions" else rows, grid):
            expected.append((made.op, made.axis, made.elements, options.itemsize(made, dtype)))
    axonn_tp.parallelize(parallel, mesh, gpt_plan(CONFIG.heads), options)
    leave_to_host(parallel)
    exact(ids[:, :-1], ids[:, 1:]).backward()
    part = mesh.shard_batch(ids)
    with torch.autocast("cpu", torch.bfloat16):
        one = serial(ids[:, :-1], ids[:, 1:])
    with Ledger(mesh.axis_names()) as ledger:
        with torch.autocast("cpu", torch.bfloat16):
            loss = parallel(part[:, :-1], part[:, 1:])
        loss.backward()
    one.backward()
    axonn_tp.sync_gradients(parallel.parameters(), mesh)
    mine = {name: whole(p, p.grad, mesh).double() for name, p in parallel.named_parameters()}
    theirs, truth = ({name: p.grad.double() for name, p in m.named_parameters()} for m in (serial, exact))
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=mesh.group("batch"))
    errors = {
        "loss": (mean / grid.batch - one).abs().item(),
        "ours": relative(mine, truth),
        "serial": relative(theirs, truth),
    }
    seen = [(e.collective.op, e.collective.axis, e.collective.elements, e.itemsize) for e in ledger.entries]
    return errors, sorted(seen), sorted(expected)


AUTOCAST = [
    (grid, layout) for grid in (Grid(2, 1, 2), Grid(1, 2, 1, 2), Grid(2, 2)) for layout in ("scattered", "replicated")
]


def autocast_on_grids(cases: list[tuple[Grid, str]]) -> list:
    return [(grid, autocast_pass(grid, Options(bucket_bytes=0, layout=layout))) for grid, layout in cases]


@pytest.mark.parametrize("cases", [AUTOCAST[::3], thorough(AUTOCAST)], ids=["some", "all"])
def test_autocast(cases: list[tuple[Grid, str]]) -> None:
    """Each axis and each layout, or each on each."""
    for found in run_ranks(autocast_on_grids, 4, cases):
        for grid, (errors, seen, expected) in found:
            assert errors["loss"] < 1e-3, (grid, errors)
            assert errors["ours"] < 1.5 * errors["serial"] < 2e-2, (grid, errors)
            assert seen == expected, grid


def mlp() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def poison(model: nn.Module, step: int, mesh: Mesh | None) -> None:
    """One infinity in one step: in the gradient of the serial model, or in one shard of the last rank."""
    if step == OVERFLOW and (mesh is None or dist.get_rank() == dist.get_world_size() - 1):
        model[2].weight.grad.view(-1)[0] = float("inf")


def train(model: nn.Module, scaler: Any, mesh: Mesh | None, clip: bool, dtype: torch.dtype | None, kind: Any) -> list:
    """The scale after every step, and whether the step changed the weights."""
    optimizer = kind(model.parameters(), lr=0.1)
    generator, found = torch.Generator().manual_seed(6), []
    for step in range(STEPS):
        rows = torch.randn(8, 8, generator=generator).to(model[0].weight.dtype)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(rows if mesh is None else mesh.shard_batch(rows)).float().square().mean()
        scaler.scale(loss).backward()
        if mesh is not None:
            axonn_tp.sync_gradients(model.parameters(), mesh)
        poison(model, step, mesh)
        if clip:
            scaler.unscale_(optimizer)
            if mesh is None:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            else:
                axonn_tp.clip_grad_norm_(model.parameters(), mesh, 0.5)
        before = model[0].weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.get_scale(), not torch.equal(before, model[0].weight)))
    return found


def scaled_on(grid: Grid, clip: bool, dtype: torch.dtype | None, kind: Any) -> tuple[float, list, list]:
    mesh = Mesh(grid)
    keywords = {"init_scale": 1024.0, "growth_interval": 2}
    serial = mlp()
    expected = train(serial, torch.amp.GradScaler("cpu", **keywords), None, clip, dtype, kind)
    parallel = axonn_tp.parallelize(mlp(), mesh, PLAN)
    got = train(parallel, axonn_tp.GradScaler(mesh, **keywords), mesh, clip, dtype, kind)
    return largest_error(serial, parallel, mesh, lambda p: p.data), got, expected


SCALED = (Grid(2, 1, 2), Grid(1, 2, 1, 2), Grid(1, 1, 4), Grid(4))


def scaled_runs(grids: tuple[Grid, ...]) -> list:
    fused = partial(torch.optim.AdamW, fused=True)
    return [
        *((1e-5, scaled_on(grid, True, None, torch.optim.AdamW)) for grid in grids),
        (1e-5, scaled_on(grids[0], False, None, fused)),
        (1e-2, scaled_on(grids[0], True, torch.float16, torch.optim.SGD)),
    ]


@pytest.mark.parametrize("grids", [SCALED[:2], thorough(SCALED)], ids=["some", "all"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(grids: tuple[Grid, ...]) -> None:
    for found in run_ranks(scaled_runs, 4, grids):
        for allowed, (error, got, expected) in found:
            assert got == expected and error < allowed
            assert [moved for _, moved in got] == [step != OVERFLOW for step in range(STEPS)]
            assert got[OVERFLOW][0] == got[OVERFLOW - 1][0] / 2


def half_precision() -> list[float]:
    """float16 weights, whose float32 gradients torch's scaler takes."""
    mesh = Mesh.create(1, 1, 2)
    model = axonn_tp.parallelize(mlp().half(), mesh, PLAN, Options(gradient_dtype="float32"))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), axonn_tp.GradScaler(mesh, init_scale=256.0)
    rows = mesh.shard_batch(torch.randn(8, 8, generator=torch.Generator().manual_seed(6)).half())
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(rows).float().square().mean()
        scaler.scale(loss).backward()
        axonn_tp.sync_gradients(model.parameters(), mesh)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def test_half_precision_weights() -> None:
    for losses in run_ranks(half_precision, 2):
        assert losses == sorted(losses, reverse=True)
