"""The planner's bytes over each axis against the ledger's in real steps: equal, not close."""

from __future__ import annotations

from dataclasses import fields
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist

import axonn_tp
from axonn_plugins.observe.ledger import Ledger
from axonn_plugins.planner.axonn import Bandwidths, Grids, Repeats, layer_communication
from axonn_plugins.planner.model import Transformer
from axonn_recipes.models.gpt import GPT, GPTConfig
from axonn_tp import Grid, LayerPlan, Linear, Mesh, Options, factorisations, place
from axonn_tp.plan.volumes import local_parameters, step_volumes
from tests.distributed import meshes, run_ranks
from tests.matrix import thorough

RANKS, BATCH, CONTEXT = 4, 8, 8
SIZES = GPTConfig(vocabulary=48, context=CONTEXT, layers=2, heads=4, hidden=16)
MODEL = Transformer("tiny", 1, 16, 4, CONTEXT)
PLAN = {
    **{"tokens": LayerPlan("embedding"), "positions": LayerPlan("embedding")},
    **{"*.ln?": LayerPlan("norm"), "norm": LayerPlan("norm")},
    **{"*.qkv": LayerPlan("normal", parts=3, heads=4), "*.proj": LayerPlan("transposed")},
    **{"*.fc1": LayerPlan("normal"), "*.fc2": LayerPlan("transposed")},
    **{"head": LayerPlan("head"), "loss": LayerPlan("loss")},
}
RUNS = {
    "scattered": (PLAN, Options()),
    "let go": (PLAN, Options(reshard_after_forward=True)),
    "half let go": (PLAN, Options(reshard_after_forward=0.5)),
    "replicated": (PLAN, Options(layout="replicated")),
    "whole stream": (
        {name: layer for name, layer in PLAN.items() if layer.kind in ("normal", "transposed")},
        Options(),
    ),
    "no plan": ({}, Options()),
}

Bytes = dict[str, Fraction]


def sent(ledger: Ledger) -> Bytes:
    return {axis: total for axis, (_, total) in ledger.by_axis().items()}


def by_equations(mesh: Mesh) -> tuple[Bytes, Bytes]:
    """Bytes of the four linears of a transformer's layer by axis: counted, and by equations 5.1 to 5.5."""
    grid, rows = mesh.grid, BATCH * CONTEXT
    at = Grids(*(np.array([grid.size(axis)]) for axis in axonn_tp.AXES))
    a_byte_a_second = Bandwidths(*(np.ones(1) for _ in fields(Bandwidths)))
    expected: Bytes = dict.fromkeys(axonn_tp.AXES, Fraction(0))
    with Ledger(mesh.axis_names()) as ledger:
        for linear in MODEL.blocks[0].linears:
            layer = Linear(linear.k, linear.n, False, mesh=mesh, transposed=linear.transposed)
            taken, given = layer.split.contracted, layer.split.output
            mine = torch.randn(rows // grid.batch, linear.k // grid.size(taken), requires_grad=True)
            layer(mine).sum().backward()
            axonn_tp.sync_gradients(layer.parameters(), mesh)
            part = layer_communication(linear, BATCH / grid.gdata, at, a_byte_a_second, Repeats())
            volumes = {"z": part.gather + part.scatter, taken: part.forward, given: part.backward, "data": part.data}
            for axis, volume in volumes.items():
                # The formulas' elements have 2 bytes, those of this run 4.
                expected[axis] += 2 * Fraction(volume.item())
    return sent(ledger), {axis: total for axis, total in expected.items() if total}


def by_counting(mesh: Mesh, name: str) -> tuple[Bytes, Bytes, int, int]:
    """Bytes of a step of a GPT by axis, counted and said; elements of parameters of this rank, likewise."""
    plan, options = RUNS[name]
    with torch.device("meta"):
        serial = GPT(SIZES)
    placements = place(serial, mesh.grid, plan, options)
    rows = BATCH // mesh.grid.batch * CONTEXT
    said = step_volumes(serial, placements, mesh.grid, rows)
    torch.manual_seed(3)
    model, ids = GPT(SIZES), torch.randint(48, (BATCH, CONTEXT + 1))
    axonn_tp.parallelize(model, mesh, plan, options)
    batch = [mesh.shard_batch(part.contiguous()) for part in (ids[:, :-1], ids[:, 1:])]
    for _ in range(2):  # passes in which ranks look at whether they read the same
        model(*batch).backward()
    with Ledger(mesh.axis_names()) as ledger:
        model(*batch).backward()
        axonn_tp.sync_gradients(model.parameters(), mesh)
    held = sum(parameter.numel() for parameter in model.parameters())
    expected = {axis: volume.sent for axis, volume in said.items()}
    scattered = {axis: volume.scattered for axis, volume in said.items()}
    for positions in (placement for placement in placements if placement.name == "positions"):
        # They are looked up once for all samples.
        for sign, tokens in ((-1, rows), (1, CONTEXT)):
            for collective in positions.collectives(tokens, mesh.grid):
                if collective.size > 1:
                    expected[collective.axis] += sign * 4 * collective.sent
                    if collective.op == "reduce_scatter":
                        scattered[collective.axis] += sign * 4 * collective.sent
    expected = {axis: total for axis, total in expected.items() if total}
    for entry in ledger.entries:
        if entry.collective.op == "reduce_scatter":
            scattered[entry.collective.axis] -= entry.sent
    assert not any(scattered.values())
    return sent(ledger), expected, held, local_parameters(serial, placements, mesh.grid)


def on_every_grid(every: bool) -> list[tuple]:
    """In every run of the tests runs take turns on grids of one axis, and on those of two, where each is once."""
    found: list[tuple] = []
    turns = {True: 0, False: len(RUNS) - 1}
    for mesh in meshes(factorisations(dist.get_world_size())):
        alone = mesh.grid.world in (mesh.grid.gx, mesh.grid.gy, mesh.grid.gz, mesh.grid.gdata)
        names = RUNS if every else [[*RUNS][turns[alone] % len(RUNS)]]
        turns[alone] += 1
        found.append((mesh.grid, by_equations(mesh), {name: by_counting(mesh, name) for name in names}))
    return found


@pytest.mark.parametrize("every", [False, thorough(True)])
def test_bytes_by_axis_are_the_ledgers(every: bool) -> None:
    grids: set[Grid] = set()
    for found in run_ranks(on_every_grid, RANKS, every):
        for grid, (got, expected), counted in found:
            grids.add(grid)
            assert got == expected, grid
            for name, (sent_by_axis, said, held, told) in counted.items():
                assert sent_by_axis == said, (grid, name)
                assert held == told, (grid, name)
    assert len(grids) == 10
