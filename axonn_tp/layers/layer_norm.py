"""LayerNorm over features that are split over y: exact, with moments of the whole row.

One collective a pass. Forward gathers each rank's mean and sum of squared deviations and joins them by Chan's
formula, which does not cancel; backward sums the two row sums that the gradient needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from axonn_tp.comm.collectives import Collective, all_gather, all_reduce
from axonn_tp.grid.layout import Layout, become
from axonn_tp.grid.mesh import Grid, Mesh
from axonn_tp.layers.activation import plain, split_as
from axonn_tp.layers.weight import Split


def check_norm(module: nn.LayerNorm, grid: Grid, name: str) -> None:
    """Refuse a LayerNorm that y cannot split.

    Raises:
        ValueError: names the layer and the reason.
    """
    if len(module.normalized_shape) != 1:
        raise ValueError(
            f"layer {name}: a LayerNorm over {len(module.normalized_shape)} dims cannot be split; name it replicated in the plan"
        )
    if module.normalized_shape[0] % grid.gy:
        raise ValueError(
            f"layer {name}: {module.normalized_shape[0]} features do not divide by gy = {grid.gy}, the axis that splits them; "
            f"choose gy from the divisors of {module.normalized_shape[0]}"
        )


def norm_layout(shape: tuple[int, ...], scattered: bool = False) -> Layout:
    """Layout of a weight or bias: split like the features; where tokens are scattered over x, every x sees others."""
    return Layout(shape, ((0, "y"),), partial=("x",) if scattered else ())


def norm_collectives(tokens: int, grid: Grid) -> list[Collective]:
    """The collectives of one forward and backward pass on one rank."""
    if grid.gy == 1:
        return []
    return [Collective("all_gather", "y", grid.gy, 2 * tokens), Collective("all_reduce", "y", grid.gy, 2 * tokens)]


class Normalise(torch.autograd.Function):
    """Rows of which each rank of y holds a part, by their moments: input, eps and mesh in."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, eps: float, mesh: Mesh) -> Tensor:  # noqa: D102
        wide = input if input.dtype == torch.float64 else input.float()
        local = wide.shape[-1]
        mean = wide.mean(-1)
        deviation = ((wide - mean[..., None]) ** 2).sum(-1)
        moments = all_gather(torch.stack([mean, deviation])[None], mesh, "y")
        means, deviations = moments[:, 0], moments[:, 1]
        mean = means.mean(0)
        variance = (deviations.sum(0) + local * ((means - mean) ** 2).sum(0)) / (local * mesh.size("y"))
        scale = (variance + eps).rsqrt()
        normal = (wide - mean[..., None]) * scale[..., None]
        ctx.save_for_backward(normal.to(input.dtype), scale)
        ctx.mesh = mesh
        return normal.to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: D102
        normal, scale = ctx.saved_tensors
        wide, normal = grad.to(scale.dtype), normal.to(scale.dtype)
        sums = all_reduce(torch.stack([wide.sum(-1), (wide * normal).sum(-1)]), ctx.mesh, "y")
        mean, along = sums / (grad.shape[-1] * ctx.mesh.size("y"))
        result = (wide - mean[..., None] - normal * along[..., None]) * scale[..., None]
        return result.to(grad.dtype), None, None


class LayerNorm(Split, nn.LayerNorm):
    """`nn.LayerNorm` over a mesh: (…, features/gy) → the same, weight and bias split over y."""

    @classmethod
    def convert(cls, module: nn.LayerNorm, mesh: Mesh, scattered: bool = False) -> None:
        """Turn an `nn.LayerNorm` that holds its full weight into this class, in place."""
        become(module, cls, nn.LayerNorm)
        assert isinstance(module, cls)
        layout = norm_layout(tuple(module.normalized_shape), scattered)
        module._split(mesh, {"weight": layout, "bias": layout})

    def forward(self, input: Tensor) -> Tensor:
        """Normalise whole rows of which this rank holds 1/gy."""
        with self._on_shares():
            return self._normalised(input)

    def _normalised(self, input: Tensor) -> Tensor:
        if self.mesh.size("y") == 1:
            return super().forward(input)
        if input.shape[-1] * self.mesh.size("y") != self.normalized_shape[0]:
            raise ValueError(
                f"{self}: the input has {input.shape[-1]} features, expected {self.normalized_shape[0]} / gy = {self.mesh.size('y')}"
            )
        output = Normalise.apply(plain(input), self.eps, self.mesh)
        if self.weight is not None:
            output = output * self.weight
        return split_as(output if self.bias is None else output + self.bias, input)
