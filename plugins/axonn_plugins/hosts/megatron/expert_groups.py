"""Experts on the ranks of a grid: who has which, and how gradients of all kinds are summed in Megatron's two groups.

Ranks are counted in blocks of neighbours, none of which has the same part of a parameter as another: a gradient is summed over the
ranks that have the same place in every block. Blocks of dense parameters are of gx·gy ranks, of weights split over z of gx·gy·gz, of
experts of as many ranks as their sizes say. Megatron sums over blocks of two sizes, those of its tensor-parallel and of its expert-parallel
groups; where there are three, blocks of one lie between, and what is left of their sums is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from axonn_tp import Grid
from ted_moe.topology import Topology


@dataclass(frozen=True)
class Blocks:
    """Sizes of the blocks.

    Attributes:
        tensor: of dense parameters, gx·gy.
        split: of weights that z splits, gx·gy·gz.
        experts: of experts.
    """

    tensor: int
    split: int
    experts: int

    @property
    def known(self) -> int:
        """The larger size that Megatron is told of."""
        return max(self.split, self.experts)

    def summed(self, size: int) -> int:
        """The size of the blocks over which Megatron sums gradients of blocks of a size."""
        return self.tensor if size <= self.tensor else self.known

    @property
    def between(self) -> tuple[int, int] | None:
        """Sizes of a block that Megatron sums and of the blocks of another size in it, the smaller first."""
        for size in (self.experts, self.split):
            if size != self.summed(size):
                return size, self.summed(size)
        return None

    def lists_between(self, ranks: int) -> list[list[int]]:
        """The ranks over which what Megatron has summed is summed again, of so many in all; each alone where nothing is left."""
        size, around = self.between or (1, 1)
        return [
            list(range(first, first + around, size))
            for begin in range(0, ranks, around)
            for first in range(begin, begin + size)
        ]


def topology_of(grid: Grid, experts: int, expert_tensor: int | None) -> Topology:
    """Where experts are.

    Args:
        grid: of one pipeline stage.
        experts: ranks that have different experts, or different shares of them but for tensor ranks.
        expert_tensor: ranks that split an expert; all tensor ranks where None.

    Raises:
        ValueError: sizes that do not lie in each other.
    """
    tensor, given = grid.gx * grid.gy, f"--expert-model-parallel-size {experts}"
    if expert_tensor not in (None, 1, tensor):
        raise ValueError(
            f"--expert-tensor-parallel-size {expert_tensor} is neither 1 nor gx*gy = {grid.gx}*{grid.gy} = {tensor}, of which a part has no group; "
            "use one of these, or leave it out"
        )
    whole = expert_tensor == 1 and tensor > 1
    room = grid.world if whole else grid.batch
    if room % experts:
        words = (
            "ranks of a stage, each with whole experts"
            if whole
            else f"ranks that read different tokens (gz*gdata = {grid.gz}*{grid.gdata})"
        )
        raise ValueError(f"{given} does not divide the {room} {words}; choose a divisor of {room}")
    blocks = experts * (1 if whole else tensor)
    for size, name in ((tensor, "gx*gy"), (tensor * grid.gz, "gx*gy*gz")):
        if max(size, blocks) % min(size, blocks):
            raise ValueError(
                f"{given}: experts take blocks of {blocks} ranks, of which {name} = {size} is neither a divisor nor a multiple; make it one"
            )
    return Topology(grid.world, tensor, experts, not whole)


def blocks_of(grid: Grid, topology: Topology) -> Blocks:
    """The sizes of a grid's blocks."""
    tensor = grid.gx * grid.gy
    return Blocks(tensor, tensor * grid.gz, topology.expert * topology.expert_tensor)


def in_stages(lists: Sequence[Sequence[int]], world: int, stages: int) -> list[list[int]]:
    """The same lists of ranks in every pipeline stage of so many ranks."""
    return [[rank + stage * world for rank in ranks] for stage in range(stages) for ranks in lists]
