"""The work of one of many ranks for a checkpoint: its plan, rank 0's for all, and a resuming rank's plan."""

from __future__ import annotations

import io

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from axonn_recipes.bench_scale.starting import Start
from axonn_tp import Grid
from axonn_tp.checkpoint.optimizer import optimizer_state, whole_pieces
from axonn_tp.checkpoint.planner import Place, RegionLoadPlanner, SavePlanner, Shard, chunk_of
from axonn_tp.checkpoint.randomness import random_state, writers_of
from axonn_tp.checkpoint.ranks import Ranks
from axonn_tp.checkpoint.state import Shards, model_state
from axonn_tp.grid.layout import Layout

AGREEMENTS = 8
"""Agreements of the ranks in a save: that all have collected, begun, written and completed; and in a load."""
_SHAPE = (1024, 4096)


def shards_of(start: Start) -> Shards:
    """Weights and AdamW's states."""
    weights, _ = model_state(start.model)
    states, _ = optimizer_state(start.optimizer, whole_pieces(start.model, start.optimizer))
    return weights | states


def own_plan(start: Start) -> object:
    """This rank's plan of a save."""
    planner = SavePlanner(Place(start.grid, start.mesh.coordinates))
    planner.set_up_planner(shards_of(start))
    return planner.create_local_plan()


def agreements(start: Start) -> None:
    """The ranks agree that nothing went wrong, as often as a save does."""
    ranks = Ranks(start.mesh)
    for _ in range(AGREEMENTS):
        ranks.together(lambda: None)


def random_states(start: Start) -> object:
    """The ranks find out who writes the states of their random number generators, and rank 0 notes it."""
    stream = io.BytesIO()
    torch.save(writers_of(random_state(), Ranks(start.mesh).group), stream)
    return stream


def weight(grid: Grid) -> Layout:
    """The layout of a normal layer's weight."""
    return Layout(_SHAPE[::-1], ((0, "x"), (1, "y")), over_z=True)


def stored(grid: Grid) -> TensorStorageMetadata:
    """The metadata of one weight in a checkpoint: a chunk for each rectangle of each rank of x, y and z."""
    layout, chunks = weight(grid), []
    numel = layout.local_numel(grid)
    shard = Shard(torch.empty(numel, device="meta"), layout)
    for rank in range(grid.gx * grid.gy * grid.gz):
        chunks += [chunk_of(region) for region in shard.regions(Place(grid, grid.coordinates(rank)))]
    return TensorStorageMetadata(TensorProperties(), torch.Size(layout.serial_shape), chunks)


def resuming(grid: Grid, metadata: TensorStorageMetadata) -> object:
    """Plan of a rank that reads one weight on another grid: half as many ranks along z, twice as many along data."""
    here = Grid(grid.gx, grid.gy, max(1, grid.gz // 2), grid.gdata * min(2, grid.gz))
    layout = weight(here)
    shard = Shard(torch.empty(layout.local_numel(here)), layout)
    planner = RegionLoadPlanner(Place(here, here.coordinates(here.world // 2)))
    planner.set_up_planner({"weight": shard}, Metadata({"weight": metadata}))
    return planner.create_local_plan()
