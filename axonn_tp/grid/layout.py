"""The layout of a parameter on the grid: pure arithmetic on shapes, and the slicing that follows from it.

A parameter of 3D PMM is cut into blocks by x and y, and the block, flattened, is cut once more over z
(Ŵ in Algorithm 3; with one rank along z it keeps its shape). Whatever does not divide is padded with zeros: blocks where the layer allows it, the
flattened block always. Gradient sums, norms and checkpoints read the layout that a parameter carries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_tp.grid.mesh import Grid


@dataclass(frozen=True)
class Layout:
    """Where the elements of one parameter are.

    Attributes:
        shape: shape of the serial parameter, or of its transpose where `transposed`.
        split: pairs (dim, axis): this dim is split over this axis; a dim that occurs again is split within its share.
        parts: `parts_dim` is this many equal matrices, one after the other (3 for a fused q, k, v), each split by itself.
        over_z: the block is split over z, and stored flat where that axis has more than one rank.
        even: pairs (dim, axis): padded so that this dim's share divides by this axis too.
        partial: axes of x and y whose ranks use the parameter on different tokens, so that its gradients are to be summed.
        transposed: the serial model keeps the matrix as (in, out), we as torch does.
        home: axes along which every rank has a parameter of its own, as experts are: not parts of one.
        grid: the grid of the same ranks that the axes are of, where it is not the mesh's (`Mesh.over`).
        parts_dim: the dim that has parts: 0, or 1 in a stack of matrices such as a layer's experts.
    """

    shape: tuple[int, ...]
    split: tuple[tuple[int, str], ...] = ()
    parts: int = 1
    over_z: bool = False
    even: tuple[tuple[int, str], ...] = ()
    partial: tuple[str, ...] = ()
    transposed: bool = False
    home: tuple[str, ...] = ()
    grid: Grid | None = None
    parts_dim: int = 0

    @property
    def serial_shape(self) -> tuple[int, ...]:
        """Shape that the serial model gives the parameter."""
        return self.shape[::-1] if self.transposed else self.shape

    @property
    def axes(self) -> frozenset[str]:
        """Axes over which the parameter is split, or has others beside it; it is replicated over the others."""
        return frozenset(axis for _, axis in self.split) | frozenset(self.home) | frozenset("z" if self.over_z else "")

    @property
    def sum_axis(self) -> str:
        """Group over which the local gradients remain to be summed: ``"data"``, ``"batch"`` (z, data) or ``"tokens"`` (x, z, data)."""
        if self.partial:
            return "tokens"
        return "data" if self.over_z or self.home else "batch"

    def padded(self, grid: Grid) -> tuple[int, ...]:
        """Shape after padding every split dim to a multiple of its axis."""
        shape = list(self.shape)
        for dim in {dim for dim, _ in self.split}:
            pieces = math.prod(grid.size(axis) for at, axis in (*self.split, *self.even) if at == dim)
            pieces *= self.parts if dim == self.parts_dim else 1
            shape[dim] = math.ceil(shape[dim] / pieces) * pieces
        return tuple(shape)

    def block_shape(self, grid: Grid) -> tuple[int, ...]:
        """Shape of the block of one (x, y)."""
        shape = list(self.padded(grid))
        for dim, axis in self.split:
            shape[dim] //= grid.size(axis)
        return tuple(shape)

    def local_numel(self, grid: Grid) -> int:
        """Elements stored on one rank."""
        numel = math.prod(self.block_shape(grid))
        return math.ceil(numel / grid.gz) if self.over_z else numel

    def counted_here(self, coordinates: Mapping[str, int], axes: Iterable[str] = ("x", "y", "z")) -> bool:
        """True if this rank counts the parameter in a sum over `axes`, so that no replica is counted twice."""
        return all(coordinates[axis] == 0 for axis in axes if axis not in self.axes)

    def homes(self, grid: Grid) -> int:
        """Number of ranks that have a parameter of their own; 1 where it is one of all."""
        return math.prod(grid.size(axis) for axis in self.home)

    def home_at(self, grid: Grid, coordinates: Mapping[str, int]) -> int:
        """Which of the homes a position is in."""
        place = 0
        for axis in reversed(self.home):
            place = place * grid.size(axis) + coordinates[axis]
        return place

    def block(self, full: Tensor, grid: Grid, coordinates: Mapping[str, int]) -> Tensor:
        """The block of `full` at a position; a view where nothing is padded."""
        if self.parts > 1:
            pieces = [
                Layout(tuple(part.shape), self.split, even=self.even).block(part, grid, coordinates)
                for part in full.chunk(self.parts, self.parts_dim)
            ]
            return torch.cat(pieces, self.parts_dim)
        padding: list[int] = []
        for have, want in zip(reversed(self.shape), reversed(self.padded(grid)), strict=True):
            padding += [0, want - have]
        block = F.pad(full, padding) if any(padding) else full
        for dim, axis in self.split:
            block = block.chunk(grid.size(axis), dim=dim)[coordinates[axis]]
        return block

    def shard(self, full: Tensor, grid: Grid, coordinates: Mapping[str, int]) -> Tensor:
        """A copy of what the rank at a position stores of the serial `full`: the block, or its flat z-shard."""
        block = self.block(full.t() if self.transposed else full, grid, coordinates)
        if not self.over_z or grid.gz == 1:
            return block.clone(memory_format=torch.contiguous_format)
        size = self.local_numel(grid)
        flat = block.reshape(-1)
        shard = flat[size * coordinates["z"] : size * (coordinates["z"] + 1)]
        return F.pad(shard, (0, size - shard.numel())).clone()

    def unflatten(self, flat: Tensor, grid: Grid) -> Tensor:
        """The block from its z-shards laid end to end."""
        shape = self.block_shape(grid)
        if flat.shape == shape:
            return flat
        numel = math.prod(shape)
        return (flat if flat.numel() == numel else flat[:numel]).view(shape)

    def assemble(self, shards: list[Tensor], grid: Grid) -> Tensor:
        """The serial parameter from the tensors of all ranks, in rank order; inverse of `shard`."""
        full = shards[0].new_zeros(self.padded(grid))
        for x in range(grid.gx):
            for y in range(grid.gy):
                at = {"x": x, "y": y, "z": 0, "data": 0}
                if self.over_z:
                    block = self.unflatten(torch.cat([shards[grid.rank(x, y, z)] for z in range(grid.gz)]), grid)
                else:
                    block = shards[grid.rank(x, y)]
                parts = (tensor.chunk(self.parts, self.parts_dim) for tensor in (full, block))
                for part, piece in zip(*parts, strict=True):
                    for dim, axis in self.split:
                        part = part.chunk(grid.size(axis), dim=dim)[at[axis]]
                    part.copy_(piece)
        full = full[tuple(slice(n) for n in self.shape)]
        return (full.t() if self.transposed else full).clone(memory_format=torch.contiguous_format)


def become(module: nn.Module, target: type[nn.Module], plain: type[nn.Module]) -> None:
    """Change a module's class in place: `plain` becomes `target`, a subclass of `plain` keeps its own methods besides."""
    kind = type(module)
    module.__class__ = target if kind is plain else type(kind.__name__, (target, kind), {})


def layout_of(parameter: Tensor) -> Layout:
    """The layout a parameter carries; one that carries none is the same on every rank."""
    return getattr(parameter, "axonn_layout", None) or Layout(tuple(parameter.shape))
