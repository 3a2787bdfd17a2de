from __future__ import annotations

import pytest
import torch

from axonn_tp import AXES, Grid, Layout, factorisations


def test_ranks_and_coordinates_are_inverse() -> None:
    grid = Grid(2, 3, 2, 2)
    assert [grid.rank(**grid.coordinates(rank)) for rank in range(grid.world)] == list(range(24))
    assert [grid.coordinates(1)[axis] for axis in AXES] == [1, 0, 0, 0]
    assert grid.coordinates(23) == {"x": 1, "y": 2, "z": 1, "data": 1}


@pytest.mark.parametrize(("world", "count"), [(1, 1), (2, 4), (4, 10), (8, 20), (12, 40)])
def test_every_factorisation_once(world: int, count: int) -> None:
    grids = list(factorisations(world))
    assert len(grids) == len(set(grids)) == count
    assert all(grid.world == world for grid in grids)


def test_world_that_does_not_divide() -> None:
    with pytest.raises(ValueError, match=r"gx\*gy\*gz = 2\*1\*3 = 6 does not divide the 8 ranks"):
        Grid.for_world(8, gx=2, gz=3)
    with pytest.raises(ValueError, match="gy = 0"):
        Grid(gy=0)


def test_drawing() -> None:
    assert Grid(2, 1, 2, 1).draw().splitlines()[1:] == ["z=0 data=0   z=1 data=0", "0 1          2 3"]


@pytest.mark.parametrize("grid", [Grid(2, 3, 2), Grid(3, 1, 4), Grid(1, 2, 1, 2), Grid(4, 2, 3)])
@pytest.mark.parametrize(
    ("shape", "split", "parts", "over_z"),
    [
        ((13, 7), ((0, "x"), (1, "y")), 1, True),
        ((36, 11), ((0, "x"), (1, "y")), 3, True),
        ((12, 5), ((0, "y"), (1, "x")), 1, False),
        ((25,), ((0, "y"),), 1, False),
        ((6,), (), 1, False),
    ],
)
def test_shards_assemble_to_the_whole(grid: Grid, shape: tuple, split: tuple, parts: int, over_z: bool) -> None:
    layout = Layout(shape, split, parts, over_z)
    full = torch.randn(shape)
    shards = [layout.shard(full, grid, grid.coordinates(rank)) for rank in range(grid.world)]
    assert {shard.numel() for shard in shards} == {layout.local_numel(grid)}
    assert torch.equal(layout.assemble(shards, grid), full)
    counted = sum(
        shard.double().square().sum()
        for rank, shard in enumerate(shards)
        if layout.counted_here(grid.coordinates(rank)) and grid.coordinates(rank)["data"] == 0
    )
    torch.testing.assert_close(counted, full.double().square().sum())


def test_fused_parts_are_split_each_by_itself() -> None:
    grid = Grid(gx=2)
    q, k, v = torch.randn(3, 4, 5).unbind()
    block = Layout((12, 5), ((0, "x"),), parts=3).shard(torch.cat([q, k, v]), grid, grid.coordinates(1))
    assert torch.equal(block, torch.cat([q[2:], k[2:], v[2:]]))
