"""The product of 3D PMM between its collectives (dissertation §5.1.1, Algorithm 3), for matrices and convolutions.

    forward   input, gathered over the output axis where it was scattered  · block of the weight
              → all-reduced, or reduce-scattered, over the contracted axis
    backward  the same mirrored; the input gradient's reduction runs while the weight's gradient is computed (OAR)

`Product` is the fast path. `reference` computes the same from differentiable collectives, one after the other; it is
what gradients of gradients use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from axonn_tp.collectives import (
    Collective,
    Pending,
    copy_to,
    gather_to,
    reduce_from,
    scatter_from,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from axonn_tp.mesh import Grid, Mesh


@dataclass(frozen=True)
class Route:
    """How activations come to a product and leave it.

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

    def collectives(self, rows: int, columns: int, grid: Grid) -> list[Collective]:
        """What one forward and backward pass communicates over x and y, axes of size 1 included.

        Args:
            rows: elements of the product's output on one rank before it is summed (tokens × its features).
            columns: elements of the product's input on one rank (tokens × its features).
            grid: the grid.
        """
        made = []
        for axis, elements, how in ((self.contracted, rows, self.gives), (self.output, columns, self.takes)):
            size = grid.size(axis)
            if how == "split":
                made.append(Collective("all_reduce", axis, size, elements))
            else:
                made.append(Collective("reduce_scatter", axis, size, elements))
                made.append(Collective("all_gather", axis, size, elements // size))
        return made


class Operation(Protocol):
    """A bilinear map of an input and a weight; `features` and `tokens` are dims of input and output."""

    features: int
    tokens: int

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

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: D102
        return F.linear(input, weight, bias)

    def spread(self, bias: Tensor) -> Tensor:  # noqa: D102
        return bias

    def grad_input(self, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:  # noqa: D102
        return grad.matmul(weight)

    def grad_weight(self, grad: Tensor, input: Tensor, shape: torch.Size) -> Tensor:  # noqa: D102
        return grad.reshape(-1, grad.shape[-1]).t().mm(input.reshape(-1, input.shape[-1]))


class Weight(Protocol):
    """What a product needs of the layer it belongs to."""

    mesh: Mesh
    operation: Operation
    overlap_all_reduce: bool
    reshard_after_forward: bool

    def block(self) -> Tensor:
        """The block of this (x, y), differentiable."""

    def block_again(self, dtype: torch.dtype) -> Tensor:
        """The same in backward, not differentiable."""


def _start_gather(tensor: Tensor, mesh: Mesh, axis: str, how: str, operation: Operation, parts: int = 1) -> Pending:
    dim = operation.tokens if how == "tokens" else operation.features
    whole = mesh.whole_tokens.get(tensor.shape[dim]) if how == "tokens" else None
    return start_all_gather(tensor, mesh, axis, dim, parts if how == "features" else 1, whole)


def _start_scatter(tensor: Tensor, mesh: Mesh, axis: str, how: str, operation: Operation, parts: int = 1) -> Pending:
    if how == "split":
        return start_all_reduce(tensor, mesh, axis)
    dim = operation.tokens if how == "tokens" else operation.features
    return start_reduce_scatter(tensor, mesh, axis, dim, parts if how == "features" else 1)


def note_tokens(mesh: Mesh, axis: str, whole: int) -> None:
    """Remember of how many tokens a scattered activation is a share, so that padding is cut off when it is gathered."""
    mesh.whole_tokens[-(-whole // mesh.size(axis))] = whole


class Product(torch.autograd.Function):
    """Collectives and products of one layer; see the module's text.

    Input, block of the weight, bias (split like the output that leaves, or None), route and layer in; output out.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, block: Tensor, bias: Tensor | None, route: Route, layer: Weight) -> Tensor:  # noqa: D102
        mesh, operation = layer.mesh, layer.operation
        whole = input
        if route.takes != "split":
            whole = _start_gather(input, mesh, route.output, route.takes, operation).wait()
        alone = mesh.size(route.contracted) == 1
        output = operation.forward(whole, block, bias if alone else None)
        if route.gives == "tokens":
            note_tokens(mesh, route.contracted, output.shape[operation.tokens])
        ctx.route, ctx.layer, ctx.shapes = route, layer, (whole.shape, block.shape, output.shape)
        ctx.dtype = block.dtype
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # The input as it came is for gradients of gradients; where nothing was gathered it is `whole` itself.
        ctx.save_for_backward(
            input,
            whole if wants_weight else None,
            block if wants_input and not layer.reshard_after_forward else None,
            bias if wants_bias else None,
        )
        output = _start_scatter(output, mesh, route.contracted, route.gives, operation, route.parts).wait()
        return output if alone or bias is None else output.add_(operation.spread(bias))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        layer, route, (wants_input, wants_weight, wants_bias) = ctx.layer, ctx.route, ctx.needs_input_grad[:3]
        mesh, operation = layer.mesh, layer.operation
        input, whole, block, bias = ctx.saved_tensors
        input_shape, block_shape, output_shape = ctx.shapes
        if torch.is_grad_enabled():
            return *_differentiable(grad, (input, block, bias), ctx.needs_input_grad, route, layer), None, None
        d_input, d_weight, d_bias, pending = None, None, None, None
        if wants_bias:
            features = operation.features % grad.dim()
            d_bias = grad.sum([dim for dim in range(grad.dim()) if dim != features])
        if route.gives != "split":
            dim = operation.tokens if route.gives == "tokens" else operation.features
            parts = route.parts if route.gives == "features" else 1
            grad = start_all_gather(grad, mesh, route.contracted, dim, parts, output_shape[dim]).wait()
        if wants_input:
            block = layer.block_again(ctx.dtype) if block is None else block
            d_input = operation.grad_input(grad, block, input_shape)
            pending = _start_scatter(d_input, mesh, route.output, route.takes, operation)
            if not layer.overlap_all_reduce:
                d_input, pending = pending.wait(), None
        if wants_weight:
            d_weight = operation.grad_weight(grad, whole, block_shape)
        if pending is not None:
            d_input = pending.wait()
        return d_input, d_weight, d_bias, None, None


def _differentiable(
    grad: Tensor, inputs: tuple[Tensor | None, ...], wanted: tuple[bool, ...], route: Route, layer: Weight
) -> list[Tensor | None]:
    """`Product.backward` for gradients of gradients: through the reference, which is run once more."""
    with torch.enable_grad():
        input, block, bias = inputs
        block = layer.block() if block is None else block
        everything = (input, block, bias)
        chosen = [t for t, wants in zip(everything, wanted, strict=False) if wants and t is not None]
        found = iter(torch.autograd.grad(reference(input, block, bias, route, layer), chosen, grad, create_graph=True))  # type: ignore[arg-type]
    return [next(found) if wants else None for wants in wanted[:3]]


def reference(input: Tensor, block: Tensor, bias: Tensor | None, route: Route, layer: Weight) -> Tensor:
    """What `Product` computes, from differentiable collectives."""
    mesh, operation = layer.mesh, layer.operation
    if route.takes == "split":
        whole = copy_to(input, mesh, route.output)
    else:
        dim = operation.tokens if route.takes == "tokens" else operation.features
        tokens = mesh.whole_tokens.get(input.shape[dim]) if route.takes == "tokens" else None
        whole = gather_to(input, mesh, route.output, dim, whole=tokens)
    output = operation.forward(whole, block, None)
    if route.gives == "split":
        output = reduce_from(output, mesh, route.contracted)
    elif route.gives == "tokens":
        note_tokens(mesh, route.contracted, output.shape[operation.tokens])
        output = scatter_from(output, mesh, route.contracted, operation.tokens)
    else:
        output = scatter_from(output, mesh, route.contracted, operation.features, route.parts)
    return output if bias is None else output + operation.spread(bias)
