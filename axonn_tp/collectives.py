"""Collectives along one axis of a mesh, and their autograd pairs.

Everything goes through torch's functional collectives, so that dispatch modes (the ledger, selective
activation checkpointing) see it. An axis of size 1 communicates nothing and returns its input.
The operators are called directly: their Python wrappers changed names between torch 2.8 and 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.distributed._functional_collectives  # noqa: F401  registers the operators below
from torch import Tensor

from axonn_tp.layout import Layout
from axonn_tp.mesh import Mesh

_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class Collective:
    """One collective as counted: `elements` is the size of the tensor that this rank puts in."""

    op: str
    axis: str
    size: int
    elements: int

    @property
    def sent(self) -> Fraction:
        """Elements that one rank sends under the ring algorithms of equations 5.1–5.5 (dissertation §5.1.2)."""
        p, n = self.size, Fraction(self.elements)
        return {
            "all_gather": (p - 1) * n,
            "reduce_scatter": n * (p - 1) / p,
            "all_reduce": 2 * n * (p - 1) / p,
            "broadcast": n * (p - 1) / p,
            "reduce": n * (p - 1) / p,
        }[self.op]


def all_reduce(tensor: Tensor, mesh: Mesh, axis: str, op: str = "sum") -> Tensor:
    """Sum (or ``"max"``) of `tensor` over an axis; same shape."""
    if mesh.size(axis) == 1:
        return tensor
    return _ops.wait_tensor(_ops.all_reduce(tensor.contiguous(), op, mesh.group(axis).group_name))


def all_gather(tensor: Tensor, mesh: Mesh, axis: str, dim: int = 0) -> Tensor:
    """The axis' tensors concatenated along `dim`."""
    size = mesh.size(axis)
    if size == 1:
        return tensor
    gathered = _ops.wait_tensor(_ops.all_gather_into_tensor(tensor.contiguous(), size, mesh.group(axis).group_name))
    return gathered if dim == 0 else torch.cat(gathered.chunk(size), dim=dim)


def reduce_scatter(tensor: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """This rank's part, along dim 0, of the sum over an axis."""
    if mesh.size(axis) == 1:
        return tensor
    scattered = _ops.reduce_scatter_tensor(tensor.contiguous(), "sum", mesh.size(axis), mesh.group(axis).group_name)
    return _ops.wait_tensor(scattered)


def _part(tensor: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    return tensor.chunk(mesh.size(axis), dim=dim)[mesh.rank(axis)]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: Mesh, axis: str) -> Tensor:
        ctx.mesh, ctx.axis = mesh, axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_from(grad, ctx.mesh, ctx.axis), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: Mesh, axis: str) -> Tensor:
        ctx.mesh, ctx.axis = mesh, axis
        return all_reduce(tensor, mesh, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return copy_to(grad, ctx.mesh, ctx.axis), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
        ctx.mesh, ctx.axis, ctx.dim = mesh, axis, dim
        return tensor.chunk(mesh.size(axis), dim=dim)[mesh.rank(axis)].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return gather_from(grad, ctx.mesh, ctx.axis, ctx.dim), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
        ctx.mesh, ctx.axis, ctx.dim = mesh, axis, dim
        return all_gather(tensor, mesh, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return split_to(grad, ctx.mesh, ctx.axis, ctx.dim), None, None, None


class _GatherSummed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return all_gather(shard, mesh, "z")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _ReduceScatter.apply(grad, ctx.mesh), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return reduce_scatter(tensor, mesh, "z")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _GatherSummed.apply(grad, ctx.mesh), None


# Each backward below is made of the function that mirrors it, so gradients of gradients are right too.


def copy_to(tensor: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """Enter a region that is split over `axis`: identity forward, all-reduce of the gradient (Algorithm 3, line 12)."""
    return tensor if mesh.size(axis) == 1 else _Copy.apply(tensor, mesh, axis)


def reduce_from(tensor: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """Leave a contraction over `axis`: all-reduce forward (Algorithm 3, line 4), identity for the gradient."""
    return tensor if mesh.size(axis) == 1 else _Reduce.apply(tensor, mesh, axis)


def split_to(tensor: Tensor, mesh: Mesh, axis: str, dim: int = -1) -> Tensor:
    """This rank's part of a tensor that is the same on all ranks of `axis`; the gradient is gathered."""
    return tensor if mesh.size(axis) == 1 else _Split.apply(tensor, mesh, axis, dim)


def gather_from(tensor: Tensor, mesh: Mesh, axis: str, dim: int = -1) -> Tensor:
    """The whole of a tensor split over `axis`, for a use that is the same on all its ranks; the gradient is split."""
    return tensor if mesh.size(axis) == 1 else _Gather.apply(tensor, mesh, axis, dim)


def gather_weight(shard: Tensor, mesh: Mesh) -> Tensor:
    """A flat weight block from its z-shards (Algorithm 3, line 2); the gradient is reduce-scattered (line 14)."""
    return shard if mesh.size("z") == 1 else _GatherSummed.apply(shard, mesh)


def whole_parameter(parameter: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """The serial parameter from everyone's shards, for a use that is the same on all ranks of x and y; differentiable."""
    block = layout.unflatten(gather_weight(parameter, mesh), mesh.grid) if layout.over_z else parameter
    for dim, axis in layout.split:
        if layout.parts > 1 and dim == 0:
            pieces = [gather_from(piece, mesh, axis, dim) for piece in block.chunk(layout.parts)]
            block = torch.cat(pieces)
        else:
            block = gather_from(block, mesh, axis, dim)
    return block[tuple(slice(size) for size in layout.shape)]
