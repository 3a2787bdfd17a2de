"""The 4D grid of ranks, bound to a running process group: which groups communicate. `Grid` says who sits where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from axonn_tp.grid.device import device_of_rank, made_where_not_split
from axonn_tp.grid.sizes import ABOUT_SAMPLES, AXES, SEVERAL, Grid, factorisations
from axonn_tp.grid.timeouts import timeout_of_world

__all__ = ["AXES", "SEVERAL", "Axes", "Grid", "Mesh", "factorisations"]


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
    tokens of a scattered residual stream) and ``"grid"``: all ranks of the stage. Where ranks of z share sequences, ``"sequence"``
    are those that share one; ``"readers"`` read different samples, and ``"replicas"`` the same.

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
        self._groups.update(self._about_samples(stages))

    def _make_groups(self, stages: int) -> dict[str, dist.ProcessGroup]:
        """Groups by axis, and by the names of those that span several; a host that has them already gives its own."""
        shape = (stages, *(self.grid.size(axis) for axis in reversed(AXES)))
        with made_where_not_split(), timeout_of_world():
            device_mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("stage", *reversed(AXES)))
            object.__setattr__(self, "device_mesh", device_mesh)
            return _groups(self.grid, device_mesh, stages)

    def _about_samples(self, stages: int) -> dict[str, dist.ProcessGroup]:
        if self.grid.sequence == 1:
            return {"readers": self._groups["batch"], "replicas": self._groups["model"]}
        known = {tuple(dist.get_process_group_ranks(group)): group for group in self._groups.values()}
        made = {}
        for name in ABOUT_SAMPLES:
            # Its own group, so that what attention sends waits for no weight.
            found = {} if name == "sequence" else known
            made[name], _ = _group(self.grid.groups_about_samples(name, stages), found)
        return made

    @classmethod
    def create(cls, gx: int = 1, gy: int = 1, gz: int = 1, device_type: str | None = None, sequence: int = 1) -> Mesh:
        """The mesh over all running ranks; the data axis takes what x, y and z leave.

        Args:
            gx: ranks along x.
            gy: ranks along y.
            gz: ranks along z.
            device_type: see `axonn_tp.grid.device.device_of_rank`.
            sequence: see `Grid`.

        Raises:
            ValueError: the sizes do not divide the ranks, or this rank has no device.
        """
        return cls(Grid.for_world(dist.get_world_size(), gx, gy, gz, sequence), device_type)

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
        """Process group along an axis, or one that spans several (see the class)."""
        return self._groups[axis]

    def size(self, axis: str) -> int:
        """Number of ranks of a group."""
        return self.grid.sequence if axis == "sequence" else self._groups[axis].size()

    def rank(self, axis: str) -> int:
        """This rank's place in a group."""
        return self.coordinates["z"] % self.grid.sequence if axis == "sequence" else self._groups[axis].rank()

    def axis_names(self) -> dict[str, str]:
        """Axis by torch's name of its group, for a ledger of what went over which axis."""
        # A group that spans several axes may be that of one of them, where the others have size 1: the axis names it.
        names = ("tokens", "model", "batch", *AXES, *(("sequence",) if self.grid.sequence > 1 else ()))
        return {self._groups[axis].group_name: axis for axis in names}

    def shard_batch(self, batch: torch.Tensor) -> torch.Tensor:
        """This rank's part of a global batch, split in dim 0 over data and z; ranks that share sequences have the same.

        Raises:
            ValueError: the batch does not divide by gz·gdata.
        """
        parts, grid = self.grid.readers, self.grid
        if batch.shape[0] % parts:
            shared = "" if grid.sequence == 1 else f"/sequence = {grid.gz}*{grid.gdata}/{grid.sequence}"
            ranks = f"gz*gdata{shared or f' = {grid.gz}*{grid.gdata}'} = {parts}"
            raise ValueError(f"a batch of {batch.shape[0]} does not divide by {ranks}; use a multiple of {parts}")
        return batch.chunk(parts)[self.rank("readers")]


class _Other(Mesh):
    """The ranks of a mesh on another grid."""

    _made: list[dist.ProcessGroup]

    def __init__(self, mesh: Mesh, grid: Grid) -> None:
        if grid.world != mesh.grid.world:
            raise ValueError(f"{grid} has {grid.world} ranks, and {mesh.grid} has {mesh.grid.world}; make them equal")
        known = {tuple(dist.get_process_group_ranks(group)): group for group in mesh._groups.values()}
        groups, made = {}, []
        for name, axes in {**{axis: (axis,) for axis in AXES}, **SEVERAL}.items():
            groups[name], new = _group(grid.groups(axes, dist.get_world_size() // grid.world), known)
            made += [groups[name]] if new else []
        groups |= {"readers": groups["batch"], "replicas": groups["model"]}
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


def _group(
    everyone: list[tuple[int, ...]], known: dict[tuple[int, ...], dist.ProcessGroup]
) -> tuple[dist.ProcessGroup, bool]:
    """This rank's group of `everyone`'s, and whether it was made now; `known` gets it."""
    mine = next(ranks for ranks in everyone if dist.get_rank() in ranks)
    new = mine not in known
    if new:
        with timeout_of_world():
            known[mine] = {ranks: dist.new_group(list(ranks)) for ranks in everyone}[mine]
    return known[mine], new


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
