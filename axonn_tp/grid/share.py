"""Which share of a split dim a rank holds, when the dim is split over one axis or over two, one within the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from axonn_tp.grid.mesh import Grid


@dataclass(frozen=True)
class Share:
    """One rank's share of a dim.

    Attributes:
        group: the group whose ranks hold the dim together; ``""`` where every rank holds all of it.
        count: number of shares.
        index: this rank's share, counted from the start of the dim.
        order: by share, the place in the group of the rank that holds it.
    """

    group: str
    count: int
    index: int
    order: tuple[int, ...]


def share_of(grid: Grid, coordinates: Mapping[str, int], axes: tuple[str, ...]) -> Share:
    """The share of the rank at a position.

    Args:
        grid: the grid.
        coordinates: the position.
        axes: the dim is split over these axes, each within the share of the one before; of x and y at most.

    Raises:
        ValueError: an axis is neither x nor y, or is named twice.
    """
    if len(set(axes)) != len(axes) or not set(axes) <= {"x", "y"}:
        raise ValueError(
            f"axes = {axes!r} is not a choice of x and y, each at most once; name the axes that split the dim"
        )
    real = tuple(axis for axis in axes if grid.size(axis) > 1)
    if len(real) < 2:
        group = real[0] if real else ""
        count = grid.size(group) if group else 1
        return Share(group, count, coordinates[group] if group else 0, tuple(range(count)))
    outer, inner = real
    count = grid.gx * grid.gy
    index = coordinates[outer] * grid.size(inner) + coordinates[inner]
    order = []
    for share in range(count):
        at = dict(zip(real, divmod(share, grid.size(inner)), strict=True))
        order.append(at["x"] + grid.gx * at["y"])
    return Share("model", count, index, tuple(order))
