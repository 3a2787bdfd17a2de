"""The work of one of many ranks for a checkpoint: its plan, rank 0's for all, and a resuming rank's plan."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from axonn_recipes.bench_scale.starting import Start
from axonn_tp import Grid
from axonn_tp.checkpoint.optimizer import optimizer_state, whole_pieces
from axonn_tp.checkpoint.planner import Place, RegionLoadPlanner, SavePlanner, Shard, chunk_of, share_chunks
from axonn_tp.checkpoint.randomness import random_state, writers_of
from axonn_tp.checkpoint.ranks import Ranks
from axonn_tp.checkpoint.state import Shards, model_state
from axonn_tp.grid.layout import Layout

AGREEMENTS = 8
"""Agreements of the ranks in a save: that all have collected, begun, written and completed; and in a load."""
_NORMAL, _TRANSPOSED, _NORM = ((0, "x"), (1, "y")), ((0, "y"), (1, "x")), ((0, "y"),)
_LLAMA_70B = (
    (Layout((8192, 8192), _NORMAL, over_z=True), 80),  # queries
    (Layout((1024, 8192), _NORMAL, over_z=True), 160),  # keys, values
    (Layout((8192, 8192), _TRANSPOSED, over_z=True), 80),
    (Layout((28672, 8192), _NORMAL, over_z=True), 160),
    (Layout((8192, 28672), _TRANSPOSED, over_z=True), 80),
    (Layout((32000, 8192), _NORMAL, over_z=True), 2),  # embedding, head
    (Layout((8192,), _NORM), 161),
)
"""Layouts, and how many weights have each."""
_COPIES = 4
"""A weight, its float32 copy, and AdamW's two states."""


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


def weights() -> Iterator[tuple[str, Layout]]:
    """The tensors of a checkpoint of Llama 70B with AdamW."""
    for number, (layout, times) in enumerate(_LLAMA_70B):
        for copy in range(times * _COPIES):
            yield f"model.layers.{copy}.{number}.weight", layout


def stored(grid: Grid) -> Metadata:
    """The metadata of all tensors: of each a chunk for each rectangle that a rank of x, y and z has."""
    metadata = Metadata({})
    for name, layout in weights():
        kind = TensorStorageMetadata(TensorProperties(), torch.Size(layout.serial_shape), _chunks(layout, grid))
        metadata.state_dict_metadata[name] = kind
    share_chunks(metadata)
    return metadata


@lru_cache(maxsize=len(_LLAMA_70B))
def _chunks(layout: Layout, grid: Grid) -> list[ChunkStorageMetadata]:
    shard = Shard(torch.empty(layout.local_numel(grid), device="meta"), layout)
    places = (Place(grid, grid.coordinates(rank)) for rank in range(grid.gx * grid.gy * grid.gz))
    return [chunk_of(region) for region in dict.fromkeys(one for place in places for one in shard.regions(place))]


def places_in_files(metadata: Metadata) -> float:
    """Bytes that say where in the files each chunk of each tensor is: those of the tensor with the most, for all."""
    kinds = metadata.state_dict_metadata.values()
    counts = [len(kind.chunks) for kind in kinds if isinstance(kind, TensorStorageMetadata)]
    most = max(counts)
    places = {
        MetadataIndex("model.layers.0.0.weight", (rank * 64, 0), rank): _StorageInfo(f"__{rank}_0.distcp", rank, 4096)
        for rank in range(most)
    }
    return len(pickle.dumps(places)) / most * sum(counts)


def resuming(grid: Grid, metadata: Metadata) -> object:
    """Plan of a rank that reads all on another grid: half as many ranks along z, twice as many along data."""
    here = Grid(grid.gx, grid.gy, max(1, grid.gz // 2), grid.gdata * min(2, grid.gz))
    shards = {name: Shard(torch.empty(layout.local_numel(here), device="meta"), layout) for name, layout in weights()}
    planner = RegionLoadPlanner(Place(here, here.coordinates(here.world // 2)))
    planner.set_up_planner(shards, metadata)
    return planner.create_local_plan()
