"""The 4D grid of ranks: who sits where, and which groups communicate.

`Grid` is pure arithmetic and needs no processes. `Mesh` binds a grid to a running process group.
The axes, innermost first, are ``x``, ``y``, ``z`` and ``data`` (dissertation §5.1.1, Figure 5.1).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from axonn_tp.grid.device import device_of_rank

AXES = ("x", "y", "z", "data")
SEVERAL = {
    "batch": ("data", "z"),
    "model": ("y", "x"),
    "tokens": ("data", "z", "x"),
    "grid": ("data", "z", "y", "x"),
}
"""Groups that span several axes, outermost first."""


@dataclass(frozen=True)
class Grid:
    """Sizes of the four axes; a rank is ``x + gx·(y + gy·(z + gz·data))``.

    Raises:
        ValueError: a size is not a positive integer.
    """

    gx: int = 1
    gy: int = 1
    gz: int = 1
    gdata: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, f"g{axis}")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"g{axis} = {size!r} is not an integer of at least 1; give the number of ranks along {axis}"
                )

    @classmethod
    def for_world(cls, world: int, gx: int = 1, gy: int = 1, gz: int = 1) -> Grid:
        """The grid of `world` ranks; the data axis takes what x, y and z leave.

        Raises:
            ValueError: gx·gy·gz does not divide `world`.
        """
        tensor = cls(gx, gy, gz).world
        if world % tensor:
            raise ValueError(
                f"gx*gy*gz = {gx}*{gy}*{gz} = {tensor} does not divide the {world} ranks of this run; "
                f"choose sizes whose product divides {world}, or start a multiple of {tensor} ranks"
            )
        return cls(gx, gy, gz, world // tensor)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.gx * self.gy * self.gz * self.gdata

    @property
    def batch(self) -> int:
        """Number of ranks that read different tokens: gz·gdata."""
        return self.gz * self.gdata

    def size(self, axis: str) -> int:
        """Size of one axis."""
        return int(getattr(self, f"g{axis}"))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` on every axis."""
        position = {}
        for axis in AXES:
            rank, position[axis] = divmod(rank, self.size(axis))
        return position

    def rank(self, x: int = 0, y: int = 0, z: int = 0, data: int = 0) -> int:
        """Rank at a position; inverse of `coordinates`."""
        return x + self.gx * (y + self.gy * (z + self.gz * data))

    def groups(self, axes: Container[str], stages: int = 1) -> list[tuple[int, ...]]:
        """The ranks of each group that spans `axes`, of so many grids one after the other."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world * stages):
            at = self.coordinates(rank % self.world)
            place = (rank // self.world, *(at[axis] for axis in AXES if axis not in axes))
            found.setdefault(place, []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    def draw(self) -> str:
        """The grid as text: one x-y plane of ranks for every z and data."""
        width = len(str(self.world - 1))
        blocks = []
        for data in range(self.gdata):
            planes = []
            for z in range(self.gz):
                rows = [f"z={z} data={data}"]
                for y in range(self.gy):
                    rows.append(" ".join(f"{self.rank(x, y, z, data):>{width}}" for x in range(self.gx)))
                planes.append(rows)
            column = max(len(row) for rows in planes for row in rows)
            blocks.append(
                "\n".join(
                    "   ".join(f"{cell:<{column}}" for cell in line).rstrip() for line in zip(*planes, strict=True)
                )
            )
        sizes = " ".join(f"g{axis}={self.size(axis)}" for axis in AXES)
        return f"{self.world} ranks, {sizes} (x to the right, y down)\n" + "\n".join(blocks)


def factorisations(world: int) -> Iterator[Grid]:
    """Every grid of `world` ranks, in lexicographic order of (gx, gy, gz)."""
    for gx in range(1, world + 1):
        for gy in range(1, world // gx + 1):
            for gz in range(1, world // (gx * gy) + 1):
                if world % (gx * gy * gz) == 0:
                    yield Grid(gx, gy, gz, world // (gx * gy * gz))


class Axes(Protocol):
    """Named axes with a process group each: what a collective asks of a mesh."""

    def group(self, axis: str) -> dist.ProcessGroup:
        """Process group along an axis of more than one rank."""

    def size(self, axis: str) -> int:
        """Number of ranks of the group."""

    def rank(self, axis: str) -> int:
        """This rank's place in the group."""


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Mesh:
    """A grid bound to the running process group; it does not change.

    Besides the four axes it has groups that span several: ``"model"`` (x and y: ranks that read the same tokens),
    ``"batch"`` (z and data: ranks that read different ones), ``"tokens"`` (x, z and data: ranks that hold different
    tokens of a scattered residual stream) and ``"grid"``: all ranks of the stage.

    Attributes:
        grid: the sizes.
        device: this rank's device.
        coordinates: this rank's place on every axis.

    Args:
        grid: sizes of the axes.
        device_type: see `axonn_tp.grid.device.device_of_rank`.
        stages: that many grids, one after the other, each a pipeline stage; the mesh is that of this rank's stage.

    Raises:
        ValueError: the grids do not have as many ranks as the process group.
    """

    grid: Grid
    device: torch.device
    coordinates: Mapping[str, int]
    device_mesh: DeviceMesh
    _groups: dict[str, dist.ProcessGroup]
    _others: dict[Grid, Mesh]

    def __init__(self, grid: Grid, device_type: str | None = None, stages: int = 1) -> None:
        if grid.world * stages != dist.get_world_size():
            raise ValueError(
                f"{stages} stages of the grid {grid} have {grid.world * stages} ranks, but {dist.get_world_size()} run; "
                "make them equal"
            )
        made = {
            "grid": grid,
            "device": device_of_rank(device_type),
            "coordinates": grid.coordinates(dist.get_rank() % grid.world),
            "_others": {},
        }
        for name, value in made.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_groups", self._make_groups(stages))

    def _make_groups(self, stages: int) -> dict[str, dist.ProcessGroup]:
        """Groups by axis, and by the names of those that span several; a host that has them already gives its own."""
        shape = (stages, *(self.grid.size(axis) for axis in reversed(AXES)))
        device_mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("stage", *reversed(AXES)))
        object.__setattr__(self, "device_mesh", device_mesh)
        return _groups(self.grid, device_mesh, stages)

    @classmethod
    def create(cls, gx: int = 1, gy: int = 1, gz: int = 1, device_type: str | None = None) -> Mesh:
        """The mesh over all running ranks; the data axis takes what x, y and z leave.

        Args:
            gx: ranks along x.
            gy: ranks along y.
            gz: ranks along z.
            device_type: see `axonn_tp.grid.device.device_of_rank`.

        Raises:
            ValueError: the sizes do not divide the ranks, or this rank has no device.
        """
        return cls(Grid.for_world(dist.get_world_size(), gx, gy, gz), device_type)

    def __deepcopy__(self, memo: dict) -> Mesh:
        """Copies of a model, as for an average of its weights, share the mesh: groups cannot be copied."""
        return self

    def __reduce__(self) -> NoReturn:
        """Nothing that holds a mesh can be pickled: process groups live in this run alone, and the layers beside them are shards.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a model that is split over ranks cannot be pickled, as torch.save(model) would; save its state_dict(), which is whole"
        )

    def over(self, grid: Grid | None) -> Mesh:
        """The same ranks in the same order on another grid; this mesh where that is None, or its own.

        Its groups are made at the first call, which every rank of every stage makes; those of ranks that have one are shared.

        Raises:
            ValueError: the grid has another number of ranks.
        """
        if grid is None or grid == self.grid:
            return self
        if grid not in self._others:
            self._others[grid] = _Other(self, grid)
        return self._others[grid]

    def destroy(self) -> None:
        """Give back the process groups, which have threads and connections; nothing that uses the mesh works after it."""
        for other in self._others.values():
            other.destroy()
        made = {*self._groups.values(), self.device_mesh.get_group("stage")} - {dist.group.WORLD}
        for group in made:
            dist.destroy_process_group(group)
        self._groups.clear()

    def group(self, axis: str) -> dist.ProcessGroup:
        """Process group along an axis, or of ``"model"``, ``"batch"``, ``"tokens"`` or ``"grid"``."""
        return self._groups[axis]

    def size(self, axis: str) -> int:
        """Number of ranks of a group."""
        return self._groups[axis].size()

    def rank(self, axis: str) -> int:
        """This rank's place in a group."""
        return self._groups[axis].rank()

    def axis_names(self) -> dict[str, str]:
        """Axis by torch's name of its group, for a ledger of what went over which axis."""
        # A group that spans several axes may be that of one of them, where the others have size 1: the axis names it.
        return {self._groups[axis].group_name: axis for axis in ("tokens", "model", "batch", *AXES)}

    def shard_batch(self, batch: torch.Tensor) -> torch.Tensor:
        """This rank's part of a global batch, split in dim 0 over data and z.

        Raises:
            ValueError: the batch does not divide by gz·gdata.
        """
        parts = self.grid.batch
        if batch.shape[0] % parts:
            raise ValueError(
                f"a batch of {batch.shape[0]} does not divide by gz*gdata = {self.grid.gz}*{self.grid.gdata} = {parts}; "
                f"use a multiple of {parts}"
            )
        return batch.chunk(parts)[self.rank("batch")]


class _Other(Mesh):
    """The ranks of a mesh on another grid."""

    _made: list[dist.ProcessGroup]

    def __init__(self, mesh: Mesh, grid: Grid) -> None:
        if grid.world != mesh.grid.world:
            raise ValueError(f"{grid} has {grid.world} ranks, and {mesh.grid} has {mesh.grid.world}; make them equal")
        known = {tuple(dist.get_process_group_ranks(group)): group for group in mesh._groups.values()}
        groups, made = {}, []
        for name, axes in {**{axis: (axis,) for axis in AXES}, **SEVERAL}.items():
            everyone = grid.groups(axes, dist.get_world_size() // grid.world)
            mine = next(ranks for ranks in everyone if dist.get_rank() in ranks)
            if mine not in known:
                new = {ranks: dist.new_group(list(ranks)) for ranks in everyone}
                known[mine] = new[mine]
                made.append(new[mine])
            groups[name] = known[mine]
        values = {
            "grid": grid,
            "device": mesh.device,
            "coordinates": grid.coordinates(mesh.grid.rank(**mesh.coordinates)),
            "device_mesh": mesh.device_mesh,
            "_groups": groups,
            "_others": {mesh.grid: mesh},
            "_made": made,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def destroy(self) -> None:
        """Give back the groups that are not the mesh's."""
        for group in self._made:
            dist.destroy_process_group(group)
        self._groups.clear()


def _groups(grid: Grid, device_mesh: DeviceMesh, stages: int) -> dict[str, dist.ProcessGroup]:
    """The groups of a mesh by axis, and by the names in `SEVERAL`."""
    groups = {axis: device_mesh.get_group(axis) for axis in AXES}
    if stages == 1:
        assert dist.group.WORLD is not None  # the device mesh makes it, if it was not there
        groups["grid"] = dist.group.WORLD
    for name, axes in SEVERAL.items():
        if name in groups:
            continue
        real = tuple(axis for axis in axes if grid.size(axis) > 1) or (axes[0],)
        known = [other for other, members in (*SEVERAL.items(), *((axis, (axis,)) for axis in AXES)) if members == real]
        found = next((other for other in known if other in groups), None)
        groups[name] = groups[found] if found else device_mesh[real]._flatten(name).get_group()
    return groups
