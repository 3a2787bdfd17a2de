"""Replicas of a parameter whose gradients no two ranks compute to the same bits stay the same, in every host."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import axonn_tp
from axonn_plugins.hosts.common.digests import digest
from axonn_plugins.hosts.plain import compose
from axonn_plugins.observe.ledger import Ledger
from axonn_tp import GradientReducer, Grid, Mesh, Options, layout_of
from tests.device import cases
from tests.device.cases import ADAMW, GPU, PLAN, case, model_of, rows_of
from tests.noisy import noisy

STEPS, EXACT = 4, torch.use_deterministic_algorithms


def apart(model: nn.Module, mesh: Mesh) -> list[str]:
    """Parameters of which replicas differ in a bit."""
    mine = {}
    for name, parameter in model.named_parameters():
        layout = layout_of(parameter)
        at = mesh.over(layout.grid).coordinates
        mine[name] = [(axis, at[axis]) for axis in sorted(layout.axes)], int(digest(parameter))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found = [(name, *each[name]) for each in everyone for name in each]
    return sorted({a[0] for a in found for b in found if a[:2] == b[:2] and a[2] != b[2]})


def sent(ledger: Ledger) -> tuple[Counter, Fraction]:
    """Broadcasts by the number of ranks, and the bytes of all that one rank sends on average."""
    calls = [entry for entry in ledger.entries if entry.collective.op == "broadcast"]
    return Counter(entry.collective.size for entry in calls), sum((entry.sent for entry in calls), Fraction())


def expected(model: nn.Module, mesh: Mesh, shared: bool = False) -> tuple[Counter, Fraction]:
    """The same by the layouts: a call for each group, of all that lies whole on it and is not summed over it; `shared`: of a rank's share."""
    elements: Counter = Counter()
    for parameter in model.parameters():
        layout = layout_of(parameter)
        over = {axis for axis in ("x", "y") if axis not in layout.axes and axis not in layout.partial}
        if ranks := math.prod(mesh.size(axis) for axis in over) - 1:
            elements[tuple(sorted(axis for axis in over if mesh.size(axis) > 1)), ranks + 1] += parameter.numel()
    itemsize = next(model.parameters()).element_size()
    return (
        Counter(ranks for _, ranks in elements),
        sum((Fraction(count * itemsize * (ranks - 1), ranks) for (_, ranks), count in elements.items()), Fraction()),
    )


class Model(nn.Module):
    """Two pairs, a layer that is whole on every rank, and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.pairs = nn.LayerNorm(6), nn.LayerNorm(6), model_of()

    def forward(self, rows: Tensor) -> Tensor:
        return self.pairs(self.norm(self.first(rows).tanh())).tanh()


PLANS = {f"pairs.{name}": kind for name, kind in PLAN.items()}


def trained(mesh: Mesh, options: Options, sums: str) -> None:
    """A plain loop."""
    torch.manual_seed(5)
    model = axonn_tp.parallelize(Model().double(), mesh, PLANS, options).to(GPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reducer = GradientReducer(model.parameters(), mesh) if sums == "reducer" else None
    finish = reducer.finish if reducer else partial(axonn_tp.sync_gradients, list(model.parameters()), mesh)
    for step in range(STEPS):
        model(mesh.shard_batch(rows_of(step)).to(GPU)).square().mean().backward()
        with Ledger(mesh.axis_names()) as ledger:
            finish()
        if step:  # in the first a reducer tells ranks its order
            assert sent(ledger) == expected(model, mesh), (sent(ledger), expected(model, mesh))
        axonn_tp.clip_grad_norm_(model.parameters(), mesh, 0.1)
        optimizer.step()
        if step < STEPS - 1:
            optimizer.zero_grad()
    assert not (found := apart(model, mesh)), (mesh.grid, options.layout, sums, found)
    assert expected(model, mesh)[1]
    for only_warn in (True, False):
        EXACT(True, warn_only=only_warn)
        with Ledger(mesh.axis_names()) as ledger:
            axonn_tp.sync_gradients(model.parameters(), mesh)
        assert bool(sent(ledger)[1]) == only_warn
    EXACT(False)


def composed(block: dict[str, Any], stage: int) -> None:
    """The suite's optimizer, where ranks have shares of gradients and of states, pruned and in host memory."""
    torch.manual_seed(5)
    with patch("axonn_tp.grid.device._default", lambda: "cuda"):
        run = compose(Model().float().to(GPU), ADAMW, block, stage=stage, max_norm=0.1)
    for step in range(STEPS):
        for part in range(2):
            rows = run.mesh.shard_batch(rows_of(2 * step + part).float()).to(GPU)
            run.backward(run.model(rows).square().mean())
        run.step()
    assert not (found := apart(run.model, run.mesh)), (block, stage, found)


def told_apart() -> None:
    """Ranks of which one is deterministic are told before they train."""
    mesh, alone = Mesh(Grid(2, 2), "cuda"), dist.get_rank() == 1
    EXACT(alone)
    try:
        axonn_tp.parallelize(Model(), mesh, PLANS)
    except ValueError as error:
        assert f"({'set' if alone else 'not set'} on rank {dist.get_rank()})" in str(error), error
    else:
        raise AssertionError("one rank sends nothing")
    finally:
        EXACT(False)
    mesh.destroy()


PLAIN: list[tuple[Grid, str, str]] = [
    (Grid(2, 2), "replicated", "reducer"),
    (Grid(2, 1, 2), "replicated", "sync_gradients"),
    (Grid(1, 2, 2), "scattered", "reducer"),
]
COMPOSED: list[tuple[int, dict[str, int]]] = [(0, {"gx": 2, "gy": 2}), (1, {"gx": 2, "gz": 2}), (2, {"gy": 2})]


@case(4)
def replicas() -> None:
    _replicas(PLAIN, COMPOSED)


@case(4)
def replicas_few() -> None:
    _replicas(PLAIN[:1], COMPOSED[1:2])


def _replicas(plain: list[tuple[Grid, str, str]], all_systems: list[tuple[int, dict[str, int]]]) -> None:
    told_apart()
    with noisy((Tensor, "tanh")):
        for grid, layout, sums in plain:
            mesh = Mesh(grid, "cuda")
            trained(mesh, Options(layout=layout), sums)  # type: ignore[arg-type]
            mesh.destroy()
        with cases.cuda.HostReads(cases.late):
            more = {"samo": {"sparsity": 0.5}, "offload_optimizer": {}}
            for stage, sizes in all_systems:
                grid_of = {"tensor_parallel": {"plan": "auto", "layout": "replicated", **sizes}}
                composed(grid_of | (more if stage else {}), stage)
