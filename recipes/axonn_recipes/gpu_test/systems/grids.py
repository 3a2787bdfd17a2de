"""Grids of a run."""

from __future__ import annotations

from axonn_recipes.gpu_test.scale import Scale
from axonn_tp import Grid, factorisations


def usual(scale: Scale) -> Grid:
    """Layers split over a node's ranks and weights over nodes; with one node, over halves of it."""
    nodes = scale.ranks // scale.local
    if nodes > 1:
        return Grid.for_world(scale.ranks, gx=scale.local, gz=nodes)
    gx = max(size for size in range(1, scale.ranks + 1) if scale.ranks % size == 0 and size**2 <= scale.ranks)
    return Grid.for_world(scale.ranks, gx=gx, gz=scale.ranks // gx)


def compared(scale: Scale) -> list[Grid]:
    """Grids whose numbers are compared: all, or so many that lie apart."""
    found = list(factorisations(scale.ranks))
    return found[:: -(-len(found) // scale.grids)]


def timed(scale: Scale) -> list[Grid]:
    """Grids that are timed: all ranks along x, along z, and the usual one."""
    ranks = scale.ranks
    return list(dict.fromkeys([Grid(gx=ranks), Grid(gz=ranks), usual(scale)]))


def name(grid: Grid) -> str:
    """A grid in short."""
    return f"gx={grid.gx} gy={grid.gy} gz={grid.gz} gdata={grid.gdata}"
