"""The product of 3D PMM between its collectives (dissertation §5.1.1, Algorithm 3), for matrices and convolutions.

    forward   input, gathered over the output axis where it was scattered (`axonn_tp.layers.entry`) · block of the weight
              → all-reduced, or reduce-scattered, over the contracted axis
    backward  the same mirrored; the input gradient's reduction runs while the weight's gradient is computed (OAR)

`Product` is the fast path. `reference` computes the same from a differentiable collective; it is what gradients of
gradients use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from axonn_tp.comm.collectives import (
    Collective,
    Pending,
    reduce_from,
    scatter_from,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from axonn_tp.grid.mesh import Grid, Mesh


@dataclass(frozen=True)
class Route:
    """The way of activations to a product and from it.

    Attributes:
        contracted: axis over which the input's features are split and the output is summed.
        output: axis over which the output's features are split.
        takes: ``"split"``: this rank's features of all tokens of the plane. ``"features"``: these features are
            scattered over `output` besides; ``"tokens"``: its tokens are.
        gives: ``"split"``: this rank's features of all tokens. ``"features"``: scattered over `contracted` besides;
            ``"tokens"``: the tokens are.
        parts: the output's features are this many equal pieces, each split by itself.
    """

    contracted: str
    output: str
    takes: str = "split"
    gives: str = "split"
    parts: int = 1

    def leaving(self, rows: int, grid: Grid) -> list[Collective]:
        """Collectives of one forward and backward pass over the contracted axis, one of size 1 included.

        Args:
            rows: elements of the product's output on one rank before it is summed (tokens × its features).
            grid: the grid.
        """
        return _both_ways(self.contracted, rows, self.gives, grid)

    def entering(self, columns: int, grid: Grid, again: bool = False) -> list[Collective]:
        """Collectives of one forward and backward pass over the output axis, one of size 1 included.

        Args:
            columns: elements of the product's input on one rank (tokens × its features).
            grid: the grid.
            again: a scattered input is gathered once more in backward.
        """
        made = _both_ways(self.output, columns, self.takes, grid)
        return [*made, made[1]] if again and len(made) > 1 else made


def _both_ways(axis: str, elements: int, how: str, grid: Grid) -> list[Collective]:
    size = grid.size(axis)
    if how == "split":
        return [Collective("all_reduce", axis, size, elements)]
    return [Collective("reduce_scatter", axis, size, elements), Collective("all_gather", axis, size, elements // size)]


class Operation(Protocol):
    """A bilinear map of an input and a weight; `features` and `tokens` are dims of input and output."""

    features: int
    tokens: int

    def once(self) -> Operation:
        """The operation of one forward and its backward."""

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output."""

    def spread(self, bias: Tensor) -> Tensor:
        """The bias as it is added to an output."""

    def grad_input(self, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of an input of this shape."""

    def grad_weight(self, grad: Tensor, input: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of a weight of this shape."""


class Matmul:
    """O = I·Wᵀ with the weight as torch stores it, (n, k)."""

    features, tokens = -1, -2

    def once(self) -> Operation:  # noqa: D102
        return self

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: D102
        return F.linear(input, weight, bias)

    def spread(self, bias: Tensor) -> Tensor:  # noqa: D102
        return bias

    def grad_input(self, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:  # noqa: D102
        return grad.matmul(weight)

    def grad_weight(self, grad: Tensor, input: Tensor, shape: torch.Size) -> Tensor:  # noqa: D102
        return grad.reshape(-1, grad.shape[-1]).t().mm(input.reshape(-1, input.shape[-1]))


class Weight(Protocol):
    """The part of a layer that its product needs."""

    mesh: Mesh
    operation: Operation
    overlap_all_reduce: bool
    reshard_after_forward: bool
    regather_inputs: bool

    def block(self) -> Tensor:
        """The block of this (x, y), differentiable."""

    def block_source(self) -> Tensor:
        """The shard that the last block was made of."""

    def block_again(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """Its block in backward, not differentiable."""


class Source(Protocol):
    """Where a product's input comes from (`axonn_tp.layers.entry.Source`)."""

    @property
    def entry(self) -> Any:
        """The entry that gathers the input again."""

    @property
    def share(self) -> Tensor:
        """This rank's share of it."""


def start_scatter(tensor: Tensor, mesh: Mesh, axis: str, how: str, operation: Operation, parts: int = 1) -> Pending:
    """Begin the sum of `tensor` over an axis, which leaves as `how` says (see `Route.gives`)."""
    if how == "split":
        return start_all_reduce(tensor, mesh, axis)
    dim = operation.tokens if how == "tokens" else operation.features
    return start_reduce_scatter(tensor, mesh, axis, dim, parts if how == "features" else 1)


def filled(tensor: Tensor, dim: int, ranks: int) -> Tensor:
    """A dim that `ranks` do not divide is filled up with its last entry: like real tokens, padding has a norm that is not zero."""
    missing = -tensor.shape[dim] % ranks
    return torch.cat([tensor, *[tensor.narrow(dim, -1, 1)] * missing], dim) if missing else tensor


class Product(torch.autograd.Function):
    """Collectives and products of one layer; see the module's text.

    The input as the product reads it, block of the weight, bias (split like the output that leaves, or None), route, layer
    and the input's source (see `axonn_tp.layers.entry`) in; output out. Where there is a source, it takes the input's gradient.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, input: Tensor, block: Tensor, bias: Tensor | None, route: Route, layer: Weight, source: Source | None
    ) -> Tensor:
        mesh, operation = layer.mesh, layer.operation.once()
        alone = mesh.size(route.contracted) == 1
        output = operation.forward(input, block, bias if alone else None)
        ctx.route, ctx.layer, ctx.operation, ctx.shapes = (
            route,
            layer,
            operation,
            (input.shape, block.shape, output.shape),
        )
        ctx.dtype, ctx.entry = block.dtype, source.entry if source is not None else None
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        ctx.again = layer.regather_inputs and wants_weight and source is not None and route.takes != "split"
        kept = source.share if ctx.again and source is not None else input
        ctx.save_for_backward(
            kept if wants_weight else None,
            block if wants_input and not layer.reshard_after_forward else None,
            bias if wants_bias else None,
            layer.block_source() if wants_input and layer.reshard_after_forward else None,
        )
        if route.gives == "tokens":
            output = filled(output, operation.tokens, mesh.size(route.contracted))
        output = start_scatter(output, mesh, route.contracted, route.gives, operation, route.parts).wait()
        # Not in place: what was communicated may be kept for a recomputation (communication-aware checkpointing).
        return output if alone or bias is None else output + operation.spread(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        layer, route, entry = ctx.layer, ctx.route, ctx.entry
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        operation = ctx.operation
        input_shape, block_shape, output_shape = ctx.shapes
        if torch.is_grad_enabled():
            return *_differentiable(ctx, grad), None, None, None
        input, block, bias, shard = ctx.saved_tensors
        d_input, d_weight, d_bias = None, None, None
        if wants_bias:
            features = operation.features % grad.dim()
            others = [dim for dim in range(grad.dim()) if dim != features]
            d_bias = grad.sum(others) if others else grad
        if route.gives != "split":
            dim = operation.tokens if route.gives == "tokens" else operation.features
            parts = route.parts if route.gives == "features" else 1
            grad = start_all_gather(grad, layer.mesh, route.contracted, dim, parts, output_shape[dim]).wait()
        if wants_weight and ctx.again:
            entry.start_again(input)
        if wants_input:
            block = layer.block_again(shard, ctx.dtype) if block is None else block
            d_input = operation.grad_input(grad, block, input_shape)
            if entry is not None:
                entry.add(d_input, layer.overlap_all_reduce)
                d_input = None
        if wants_weight:
            d_weight = operation.grad_weight(grad, entry.again() if ctx.again else input, block_shape)
        if ctx.again:
            entry.leave()
        return d_input, d_weight, d_bias, None, None, None


def _differentiable(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """`Product.backward` for gradients of gradients: through the reference, which is run once more."""
    input, block, bias, _ = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:3]
    with torch.enable_grad():
        if ctx.again:
            input = ctx.entry.reference(input)
        input = grad.new_zeros(ctx.shapes[0]).requires_grad_() if input is None else input
        block = ctx.layer.block() if block is None else block
        everything = (input, block, bias)
        chosen = [t for t, wants in zip(everything, wanted, strict=True) if wants and t is not None]
        output = reference(input, block, bias, ctx.route, ctx.layer)
        found = iter(torch.autograd.grad(output, chosen, grad, create_graph=True))
    return [next(found) if wants else None for wants in wanted]


def reference(input: Tensor, block: Tensor, bias: Tensor | None, route: Route, layer: Weight) -> Tensor:
    """The result of `Product`, from a differentiable collective."""
    mesh, operation = layer.mesh, layer.operation
    output = operation.forward(input, block, None)
    if route.gives == "split":
        output = reduce_from(output, mesh, route.contracted)
    elif route.gives == "tokens":
        output = scatter_from(output, mesh, route.contracted, operation.tokens)
    else:
        output = scatter_from(output, mesh, route.contracted, operation.features, route.parts)
    return output if bias is None else output + operation.spread(bias)
