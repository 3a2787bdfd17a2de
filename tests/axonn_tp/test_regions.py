"""The rectangles that ranks hold tile the serial tensor exactly, and agree with what `Layout` cuts and puts together."""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections.abc import Sequence

import pytest
import torch
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata, TensorProperties, TensorStorageMetadata

from axonn_tp import Grid, Layout, factorisations
from axonn_tp.checkpoint.planner import Place, RegionLoadPlanner, Shard, chunk_of, share_chunks
from axonn_tp.grid.regions import Region, regions

LAYOUTS = [
    Layout((), ()),
    Layout((7,), ()),
    Layout((5, 3), (), over_z=True),
    Layout((24,), ((0, "x"),)),
    Layout((7,), ((0, "y"),)),
    Layout((24, 40), ((0, "x"), (1, "y"))),
    Layout((11, 13), ((0, "x"), (1, "y")), over_z=True),
    Layout((9, 10), ((1, "x"), (0, "y")), over_z=True),
    Layout((21, 5), ((0, "x"), (1, "y")), parts=3, over_z=True),
    Layout((48, 9), ((0, "y"),), parts=3),
    Layout((30,), ((0, "x"),), parts=2, over_z=True),
    Layout((24, 5), ((0, "x"), (0, "y")), over_z=True),
    Layout((6, 5, 3, 3), ((0, "x"), (1, "y")), over_z=True),
    Layout((1, 1), ((0, "x"), (1, "y")), over_z=True),
    Layout((0, 4), ((1, "y"),), over_z=True),
]
GRIDS = [grid for world in range(1, 9) for grid in factorisations(world)]


def holders(layout: Layout, grid: Grid) -> list[dict[str, int]]:
    """One rank for each part: the replicas left out."""
    every = [grid.coordinates(rank) for rank in range(grid.world)]
    return [at for at in every if layout.counted_here(at, ("x", "y", "z", "data"))]


def serial(layout: Layout) -> torch.Tensor:
    return torch.arange(1, math.prod(layout.shape) + 1).view(layout.shape)


def place(region: Region, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[tuple(slice(at, at + size) for at, size in zip(region.offsets, region.sizes, strict=True))]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_tile_the_serial_tensor(layout: Layout) -> None:
    full = serial(layout)
    for grid in GRIDS:
        count, shards = torch.zeros_like(full), []
        for rank in range(grid.world):
            at = grid.coordinates(rank)
            local = torch.zeros(layout.local_numel(grid), dtype=full.dtype)
            for region in regions(layout, grid, at):
                region.view(local).copy_(place(region, full))
                if at in holders(layout, grid):
                    place(region, count).add_(1)
            shard = layout.shard(full, grid, at)
            assert torch.equal(local, shard.flatten()), (grid, at)
            shards.append(local.view(shard.shape))
        assert (count == 1).all(), grid
        # `assemble` does not know parts that are padded one by one, nor tensors without dims; no layer makes either.
        if layout.shape and (layout.parts == 1 or layout.padded(grid) == layout.shape):
            assert torch.equal(layout.assemble(shards, grid), full)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_partitions_of_a_shard_tile_too(layout: Layout) -> None:
    full = serial(layout)
    random.seed(1)
    for grid in GRIDS:
        count = torch.zeros_like(full)
        for at in holders(layout, grid):
            numel = layout.local_numel(grid)
            shard = layout.shard(full, grid, at).flatten()
            cuts = sorted({0, numel, *random.choices(range(numel + 1), k=3)})
            for start, stop in zip(cuts, cuts[1:], strict=False):
                for region in regions(layout, grid, at, start, stop):
                    place(region, count).add_(1)
                    assert torch.equal(region.view(shard[start:stop]), place(region, full))
        assert (count == 1).all(), grid


def test_a_shard_is_a_few_rectangles() -> None:
    layout, grid = Layout((300, 70), ((0, "x"), (1, "y")), parts=3, over_z=True), Grid(2, 1, 4)
    for rank in range(grid.world):
        assert len(regions(layout, grid, grid.coordinates(rank))) <= 2 + 3


@pytest.mark.parametrize("limit", [1, 7, 12, 1000])
def test_pieces(limit: int) -> None:
    full = torch.arange(5 * 6 * 4).view(5, 6, 4)
    found = torch.zeros_like(full)
    for region in regions(Layout((5, 6, 4)), Grid(), Grid().coordinates(0)):
        for piece in region.pieces(limit):
            assert math.prod(piece.sizes) <= limit
            place(piece, found).add_(piece.view(full.flatten()))
    assert torch.equal(found, full)


def stored(names: dict[str, Layout], grid: Grid) -> Metadata:
    """A checkpoint's metadata, each tensor's chunks in an order of its own."""
    lot = random.Random(5)
    kinds: dict[str, STORAGE_TYPES] = {}
    for name, layout in names.items():
        chunks = [chunk_of(one) for at in holders(layout, grid) for one in regions(layout, grid, at)]
        kinds[name] = TensorStorageMetadata(
            TensorProperties(), torch.Size(layout.serial_shape), lot.sample(chunks, len(chunks))
        )
    return Metadata(kinds)


def reads(names: dict[str, Layout], metadata: Metadata, place: Place) -> Sequence[tuple]:
    planner = RegionLoadPlanner(place)
    shards = {name: Shard(torch.empty(layout.local_numel(place.grid)), layout) for name, layout in names.items()}
    planner.set_up_planner(shards, metadata)
    items = planner.create_local_plan().items
    found = [
        (item.dest_index, item.dest_offsets, item.storage_index, item.storage_offsets, item.lengths) for item in items
    ]
    assert all(planner.resolve_tensor(item).shape == item.lengths for item in items)
    return sorted(found, key=repr)


def test_tensors_cut_alike_share_their_chunks_and_are_read_as_before() -> None:
    names = {f"{number}.{copy}": layout for number, layout in enumerate(LAYOUTS[3:-1]) for copy in range(9)}
    before = stored(names, Grid(2, 2, 4))
    shared = copy.deepcopy(before)
    share_chunks(shared)
    for here in (Grid(), Grid(2, 1, 2), Grid(1, 2, 2, 2), Grid(4, 2, 1)):
        for rank in {0, here.world // 2, here.world - 1}:
            place = Place(here, here.coordinates(rank))
            assert reads(names, shared, place) == reads(names, before, place)
    assert len({id(kind.chunks) for kind in shared.state_dict_metadata.values()}) <= len(LAYOUTS)  # type: ignore[union-attr]
    assert len(pickle.dumps(shared)) < len(pickle.dumps(before)) / 4
