"""Collectives along one axis of a mesh, and their autograd pairs.

Everything goes through torch's functional collectives, so that dispatch modes (the ledger, selective
activation checkpointing) see it. An axis of size 1 communicates nothing and returns its input.
The operators are called directly: their Python wrappers changed names between torch 2.8 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # noqa: F401  registers the operators below
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from axonn_tp.comm.gloo_reduce_scatter import fewer_in_parts, on_gloo, start_parts, sum_parts
from axonn_tp.grid.layout import Layout
from axonn_tp.grid.mesh import Axes, Mesh

_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class Collective:
    """One collective as counted: `elements` is the size of the tensor that this rank puts in; of an exchange all is for others."""

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
            "all_to_all": n * (p - 1) / p,
            "broadcast": n * (p - 1) / p,
            "reduce": n * (p - 1) / p,
            "exchange": n,
        }[self.op]


class Pending:
    """A collective under way.

    Attributes:
        tensor: what it writes to; not to be read before `wait`.
        whole: that holds every rank's part of the result, several times its size.
    """

    def __init__(self, tensor: Tensor, arrange: Callable[[Tensor], Tensor] | None = None, whole: bool = False) -> None:
        self.tensor, self._arrange, self.whole = tensor, arrange, whole

    def wait(self) -> Tensor:
        """The result."""
        done = wait(self.tensor)
        return done if self._arrange is None else self._arrange(done)


def wait(tensor: Tensor) -> Tensor:
    """The same tensor once the collective that writes to it, if any, is done."""
    return _ops.wait_tensor(tensor)


class _Done(Pending):
    def wait(self) -> Tensor:
        return self.tensor


def start_all_reduce(tensor: Tensor, mesh: Axes, axis: str, op: str = "sum") -> Pending:
    """Begin the sum (or ``"max"``) of `tensor` over an axis; same shape."""
    if mesh.size(axis) == 1:
        return _Done(tensor)
    return Pending(_ops.all_reduce(tensor.contiguous(), op, mesh.group(axis).group_name))


def start_all_reduce_(tensor: Tensor, mesh: Axes, axis: str) -> Pending:
    """Begin the sum of a contiguous tensor over an axis of more than one rank, in place."""
    return Pending(_ops.all_reduce_(tensor, "sum", mesh.group(axis).group_name))


def start_all_gather(
    tensor: Tensor, mesh: Axes, axis: str, dim: int = 0, parts: int = 1, whole: int | None = None
) -> Pending:
    """Begin to join the axis' tensors along `dim`.

    Args:
        tensor: this rank's share.
        mesh: the mesh.
        axis: the axis.
        dim: the dim that is split.
        parts: the dim is this many equal pieces, each split by itself.
        whole: size of the joined dim without padding; everything when None.
    """
    size = mesh.size(axis)
    if size == 1:
        return _Done(tensor)
    dim %= tensor.dim()

    def arrange(gathered: Tensor) -> Tensor:
        if dim or parts > 1:
            stacked = gathered.view(size, *tensor.shape).unflatten(dim + 1, (parts, tensor.shape[dim] // parts))
            gathered = stacked.movedim(0, dim + 1).flatten(dim, dim + 2)
        return gathered if whole is None or whole == gathered.shape[dim] else gathered.narrow(dim, 0, whole)

    return Pending(_start_flat_gather(tensor.contiguous(), size, mesh.group(axis)), arrange)


def _start_flat_gather(tensor: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    if isinstance(tensor, FunctionalTensor):  # the compiler's, which cannot trace an operator that writes to `out`
        operators = torch.ops.axonn if on_gloo(group, tensor) else _ops
        return operators.all_gather_into_tensor(tensor, size, group.group_name)
    return _start_gather_into_new(tensor, size, group.group_name)


def _start_gather_into_new(tensor: Tensor, size: int, group_name: str) -> Tensor:
    # Not `all_gather_into_tensor`, which gloo runs as ALLGATHER_COALESCED: its two threads write the name of the work
    # they have finished to one std::string without a lock, and a name of more than 15 characters lies on the heap, which
    # they then free twice (torch 2.13, ProcessGroupGloo::runLoop). This operator is ALLGATHER.
    return _ops.all_gather_into_tensor_out(tensor, size, group_name, out=_gathered(tensor, size, group_name))


def _gathered(tensor: Tensor, size: int, group_name: str) -> Tensor:
    return tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:]))


_library = torch.library.Library("axonn", "FRAGMENT")
_library.define("all_gather_into_tensor(Tensor input, int group_size, str group_name) -> Tensor")
_library.impl("all_gather_into_tensor", lambda *given: wait(_start_gather_into_new(*given)), "CPU")
_library.impl("all_gather_into_tensor", _gathered, "Meta")


def start_reduce_scatter(tensor: Tensor, mesh: Axes, axis: str, dim: int = 0, parts: int = 1) -> Pending:
    """Begin the sum over an axis of which this rank gets its share along `dim`; the inverse of `start_all_gather`.

    A dim that does not divide is padded with zeros.
    """
    size = mesh.size(axis)
    if size == 1:
        return _Done(tensor)
    dim %= tensor.dim()
    if tensor.shape[dim] % (size * parts):
        missing = -tensor.shape[dim] % (size * parts)
        tensor = F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, missing])
    if dim or parts > 1:
        tensor = tensor.unflatten(dim, (parts, size, tensor.shape[dim] // (parts * size))).movedim(dim + 1, 0)
        joined = tensor.contiguous().flatten(0, 1)

        def arrange(scattered: Tensor) -> Tensor:
            return scattered.flatten(dim, dim + 1)
    else:
        joined = tensor.contiguous()

        def arrange(scattered: Tensor) -> Tensor:
            return scattered

    return Pending(_ops.reduce_scatter_tensor(joined, "sum", size, mesh.group(axis).group_name), arrange)


def start_sum_of_shares(tensor: Tensor, mesh: Axes, axis: str) -> Pending:
    """`start_reduce_scatter` of a flat tensor over an axis of more than one rank, with the bytes of one on gloo too."""
    group = mesh.group(axis)
    if not fewer_in_parts(group, tensor):
        return start_reduce_scatter(tensor, mesh, axis)
    padded = F.pad(tensor, (0, missing)) if (missing := -len(tensor) % group.size()) else tensor.contiguous()
    return Pending(start_parts(padded, group), partial(sum_parts, group=group), whole=True)


def start_all_to_all(tensor: Tensor, mesh: Axes, axis: str, sent: list[int], received: list[int]) -> Pending:
    """Begin to give each rank of an axis of more than one its rows of `tensor`, (rows, …).

    Args:
        tensor: the rows, by the rank that gets them.
        mesh: the mesh.
        axis: the axis.
        sent: how many each rank gets.
        received: how many come from each.
    """
    return Pending(_ops.all_to_all_single(tensor.contiguous(), received, sent, mesh.group(axis).group_name))


def all_reduce(tensor: Tensor, mesh: Axes, axis: str, op: str = "sum") -> Tensor:
    """Sum (or ``"max"``) of `tensor` over an axis; same shape."""
    return start_all_reduce(tensor, mesh, axis, op).wait()


def all_gather(tensor: Tensor, mesh: Axes, axis: str, dim: int = 0, parts: int = 1, whole: int | None = None) -> Tensor:
    """The axis' tensors joined along `dim`; see `start_all_gather`."""
    return start_all_gather(tensor, mesh, axis, dim, parts, whole).wait()


def reduce_scatter(tensor: Tensor, mesh: Axes, axis: str, dim: int = 0, parts: int = 1) -> Tensor:
    """This rank's share, along `dim`, of the sum over an axis; see `start_reduce_scatter`."""
    return start_reduce_scatter(tensor, mesh, axis, dim, parts).wait()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: Axes, axis: str) -> Tensor:
        ctx.mesh, ctx.axis = mesh, axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_from(grad, ctx.mesh, ctx.axis), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: Axes, axis: str) -> Tensor:
        ctx.mesh, ctx.axis = mesh, axis
        return all_reduce(tensor, mesh, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return copy_to(grad, ctx.mesh, ctx.axis), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: Axes, axis: str, dim: int) -> Tensor:
        ctx.mesh, ctx.axis, ctx.dim = mesh, axis, dim
        return tensor.chunk(mesh.size(axis), dim=dim)[mesh.rank(axis)].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return gather_from(grad, ctx.mesh, ctx.axis, ctx.dim), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: Axes, axis: str, dim: int) -> Tensor:
        ctx.mesh, ctx.axis, ctx.dim = mesh, axis, dim
        return all_gather(tensor, mesh, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return split_to(grad, ctx.mesh, ctx.axis, ctx.dim), None, None, None


class _GatherSummed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: Axes, axis: str, dim: int, parts: int, whole: int | None) -> Tensor:
        ctx.arguments = (mesh, axis, dim, parts)
        return all_gather(tensor, mesh, axis, dim, parts, whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        return _ReduceScatter.apply(grad, *ctx.arguments), None, None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: Axes, axis: str, dim: int, parts: int) -> Tensor:
        ctx.arguments = (mesh, axis, dim, parts, tensor.shape[dim])
        return reduce_scatter(tensor, mesh, axis, dim, parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _GatherSummed.apply(grad, *ctx.arguments), None, None, None, None


# Each backward below is made of the function that mirrors it, so gradients of gradients are right too.


def copy_to(tensor: Tensor, mesh: Axes, axis: str) -> Tensor:
    """Enter a region that is split over `axis`: identity forward, all-reduce of the gradient (Algorithm 3, line 12)."""
    return tensor if mesh.size(axis) == 1 else _Copy.apply(tensor, mesh, axis)


def reduce_from(tensor: Tensor, mesh: Axes, axis: str) -> Tensor:
    """Leave a contraction over `axis`: all-reduce forward (Algorithm 3, line 4), identity for the gradient."""
    return tensor if mesh.size(axis) == 1 else _Reduce.apply(tensor, mesh, axis)


def split_to(tensor: Tensor, mesh: Axes, axis: str, dim: int = -1) -> Tensor:
    """This rank's part of a tensor that is the same on all ranks of `axis`; the gradient is gathered."""
    return tensor if mesh.size(axis) == 1 else _Split.apply(tensor, mesh, axis, dim)


def gather_from(tensor: Tensor, mesh: Axes, axis: str, dim: int = -1) -> Tensor:
    """The whole of a tensor split over `axis`, for a use that is the same on all its ranks; the gradient is split."""
    return tensor if mesh.size(axis) == 1 else _Gather.apply(tensor, mesh, axis, dim)


def gather_to(tensor: Tensor, mesh: Axes, axis: str, dim: int, parts: int = 1, whole: int | None = None) -> Tensor:
    """The whole of a tensor split over `axis`, for a use that differs among its ranks; the gradient is reduce-scattered."""
    return tensor if mesh.size(axis) == 1 else _GatherSummed.apply(tensor, mesh, axis, dim, parts, whole)


def scatter_from(tensor: Tensor, mesh: Axes, axis: str, dim: int, parts: int = 1) -> Tensor:
    """Leave a contraction over `axis` with a share along `dim` of the sum: reduce-scatter; the gradient is gathered."""
    return tensor if mesh.size(axis) == 1 else _ReduceScatter.apply(tensor, mesh, axis, dim, parts)


def gather_weight(shard: Tensor, mesh: Mesh) -> Tensor:
    """A flat weight block from its z-shards (Algorithm 3, line 2); the gradient is reduce-scattered (line 14)."""
    return gather_to(shard, mesh, "z", 0)


def whole_parameter(parameter: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """The serial parameter from everyone's shards, for a use that is the same on all ranks of x and y; differentiable."""
    block = layout.unflatten(gather_weight(parameter, mesh), mesh.grid) if layout.over_z else parameter
    for dim, axis in reversed(layout.split):
        if layout.parts > 1 and dim == layout.parts_dim:
            pieces = [gather_from(piece, mesh, axis, dim) for piece in block.chunk(layout.parts, dim)]
            block = torch.cat(pieces, dim)
        else:
            block = gather_from(block, mesh, axis, dim)
    block = block[tuple(slice(size) for size in layout.shape)]
    return block.t() if layout.transposed else block
