"""SAMO on the shards of axonn_tp, against masked dense training of the serial model."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import axonn_tp
import samo
from axonn_plugins.samo.mesh import shards_of
from axonn_tp import Grid, LayerPlan, Mesh
from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.samo.reference import Masked

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
PLAN = {"up": LayerPlan("normal"), "down": LayerPlan("transposed")}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.alone = nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(6, 5)

    def forward(self, rows):
        return self.alone(self.down(self.up(rows).tanh()))


def on_grids(grids, every):
    torch.manual_seed(3)
    serial = Model().double()
    batches = [torch.randn(8, 6, dtype=torch.float64) for _ in range(5)]
    masks = samo.magnitude(serial, 0.6)
    dense = copy.deepcopy(serial)
    reference = Masked(ADAMW, dense, masks, max_norm=0.05)
    for batch in batches:
        dense(batch).square().mean().backward()
        reference.step()
    for number, grid in enumerate(grids):
        for shard in (False, True) if every else (number % 2 == 0,):
            mesh = Mesh(grid)
            model = axonn_tp.parallelize(copy.deepcopy(serial), mesh, PLAN)
            parameters = dict(model.named_parameters())
            optimizer = samo.Optimizer(
                ADAMW,
                model,
                samo.magnitude(model, 0.6, shards=shards_of(mesh)),
                max_norm=0.05,
                group=partial(axonn_tp.sum_ranks, mesh=mesh),
                norm=partial(axonn_tp.global_square, parameters=parameters, mesh=mesh),
                stage=int(shard),
                tile_size=7,
            )
            for batch in batches:
                model(mesh.shard_batch(batch)).square().mean().backward()
                optimizer.step()
            full = axonn_tp.full_state_dict(model, mesh)
            assert full or dist.get_rank()
            for name in full:
                expected = dense.state_dict()[name]
                torch.testing.assert_close(
                    full[name], expected, rtol=0, atol=1e-10, msg=f"{name} on {grid}, shard {shard}"
                )
                assert name not in masks or torch.count_nonzero(full[name][~masks[name]]) == 0
    dist.barrier()


@pytest.mark.parametrize("every", [False, thorough(True)])
def test_on_grids_of_four(every):
    grids = [Grid(1, 1, 1, 4), Grid(2, 1, 1, 2), Grid(1, 2, 2, 1), Grid(1, 1, 2, 2), Grid(2, 2, 1, 1)]
    run_ranks(on_grids, 4, grids, every)
