"""The ranks that save or load together; alone where there is no mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from axonn_tp.checkpoint.background import let_saving_end
from axonn_tp.checkpoint.files import CheckpointError
from axonn_tp.checkpoint.planner import Place
from axonn_tp.grid.mesh import Mesh
from axonn_tp.grid.timeouts import timeout_of_world

T = TypeVar("T")
# A group of our own: a save in the background must not meet the training's collectives, and NCCL sends no objects.
_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


class Ranks:
    """All ranks of a mesh, or this process alone; lets a save in the background end first.

    Args:
        mesh: None for a serial run.
        apart: whether other ranks hold tensors of other names, as the stages of a pipeline do.
    """

    def __init__(self, mesh: Mesh | None, apart: bool = False) -> None:
        let_saving_end()
        self.apart = apart
        self.group: dist.ProcessGroup | None = None
        self.place, self.rank, self.world = Place(), 0, 1
        if mesh is not None:
            self.place = Place(mesh.grid, mesh.coordinates)
            self.rank, self.world, self.group = dist.get_rank(), dist.get_world_size(), _group()

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on all."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self.group)
        return found

    def collect(self, value: T) -> list[T]:
        """The values of all ranks on rank 0, nothing on the others."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.world if self.rank == 0 else []
        dist.gather_object(value, found if self.rank == 0 else None, dst=0, group=self.group)
        return found

    def together(self, function: Callable[[], T], only: int | None = None) -> T:
        """Call the function and return its result; where it fails on one rank it fails on all, so that none waits for another.

        Args:
            function: communicates nothing.
            only: run it on this rank and return None on the others.

        Raises:
            CheckpointError: the first rank's failure, the same on every rank.
        """
        problem, result = None, None
        if only is None or only == self.rank:
            try:
                result = function()
            except Exception as error:
                problem = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        # All ranks' words are gathered where there are any: with thousands of ranks that takes a second.
        if self._anywhere(problem is not None):
            raise CheckpointError(next(trouble for trouble in self.gather(problem) if trouble is not None))
        return result  # type: ignore[return-value]

    def _anywhere(self, here: bool) -> bool:
        if self.group is None:
            return here
        flag = torch.tensor(int(here))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group)
        return bool(flag)


def _group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    if world not in _groups:
        _groups.clear()
        with timeout_of_world():
            _groups[world] = dist.new_group(backend="cpu:pccl" if "cpu:pccl" in dist.get_backend_config() else "gloo")
    return _groups[world]
