"""4D parallelism in plain PyTorch: every grid beside the serial model, and some beside FSDP2 and DDP."""

from __future__ import annotations

from functools import partial

import torch

import axonn_tp
from axonn_recipes.bench.numbers import spread
from axonn_recipes.bench_tp import sides
from axonn_recipes.bench_tp.settings import STAGES, Settings, options_of
from axonn_recipes.gpu_test.scale import EXACT, Check, Figure, Found, Scale, apart
from axonn_recipes.gpu_test.systems import grids
from axonn_recipes.gpu_test.training import (
    LEARNING_RATE,
    WEIGHT_DECAY,
    Serial,
    gpt,
    hidden,
    mean,
    multiplied,
    readers_part,
    serial,
    timed,
    utilisation,
)
from axonn_tp import Grid, Mesh

_NONE, _ALL = STAGES[0][0], STAGES[-1][0]


def run(scale: Scale) -> Found:
    """Losses, gradients' norms and weights on all grids; times and what overlaps on some."""
    expected, settings, found = serial(scale, lambda: gpt(scale.compared)), settings_of(scale), Found()
    for grid in grids.compared(scale):
        found.checks += _compared(scale, grid, expected)
    for grid in grids.timed(scale):
        side = timed(grids.name(grid), True, partial(sides.ours, settings, grid, {}), scale)
        found.sides.append(side)
        found.figures.append(utilisation(side, scale, multiplied(scale.timed)))
    for peer in ("fsdp2", "ddp"):
        side = timed(peer, False, partial(sides.build, peer, settings), scale)
        found.sides.append(side)
        found.figures.append(utilisation(side, scale, multiplied(scale.timed)))
    if scale.ranks > 1:
        found.figures += _overlap(scale, settings, grids.usual(scale))
    return found


def settings_of(scale: Scale) -> Settings:
    """The run in the words of ``axonn bench tp``."""
    model = scale.timed
    return Settings(
        nodes=scale.ranks // scale.local,
        ranks_per_node=scale.local,
        latency="0us",
        bandwidth=None,
        layers=model.layers,
        heads=model.heads,
        context=model.context,
        hidden=model.hidden,
        batch=scale.batch * scale.ranks,
        rounds=scale.rounds,
        emulated=False,
        peers=(),
        grids=(),
        screen=False,
        dtype=scale.dtype,
    )


def _compared(scale: Scale, grid: Grid, expected: Serial) -> list[Check]:
    mesh = Mesh(grid, scale.device)
    settings = settings_of(scale)
    plan = settings.trained.plan(settings)
    model = axonn_tp.parallelize(gpt(scale.compared).double().to(scale.place), mesh, plan)
    reducer = axonn_tp.GradientReducer(model.parameters(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    losses, norms = [], []
    for ids, targets in readers_part(scale, grid.readers, mesh.rank("readers")):
        loss = model(ids, targets)
        loss.backward()
        reducer.finish()
        norms.append(float(axonn_tp.grad_norm(model.parameters(), mesh)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss.detach()))
    name = grids.name(grid)
    weights = axonn_tp.full_state_dict(model, mesh)  # on rank 0
    serial_weights = expected.model.state_dict()
    worst = max([_relative(weights[key], serial_weights[key]) for key in weights], default=0.0)
    mesh.destroy()
    return [
        Check(f"{name}: losses", apart(losses, expected.losses), EXACT),
        Check(f"{name}: norm of the gradient", apart(norms, expected.norms), EXACT),
        Check(f"{name}: weights after {len(losses)} steps", apart([1 + worst], [1.0]), EXACT),
    ]


def _relative(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    theirs = theirs.to(mine)
    return ((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3)).nan_to_num(nan=torch.inf).item()


def _overlap(scale: Scale, settings: Settings, grid: Grid) -> list[Figure]:
    """The factor by which a step is longer where nothing overlaps, and the share of the communication that is hidden."""
    took = {}
    for stage in (_NONE, _ALL):
        side = timed(stage, True, partial(sides.ours, settings, grid, options_of(stage)), scale)
        took[stage] = spread(side.seconds)["median"]
    step = sides.ours(settings, grid, {})
    step()
    where = grids.name(grid)
    return [
        Figure(f"a step without overlap beside one with it, {where}", took[_NONE] / took[_ALL], "x"),
        Figure(f"communication that computation hides, {where}", hidden(step), "%"),
    ]
