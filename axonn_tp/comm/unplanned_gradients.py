"""Gradients of parameters that no plan names and no layer splits: a norm of query heads, a scale in a scattered stream.

Such a parameter is the same on every rank of x and y. Where it is used on shares of an activation, each rank's gradient
is that of its share, and they are to be summed; where it is used on whole activations, all ranks have the whole gradient
already. Nothing about the parameter tells which, but its first gradient does: those of replicas agree to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from axonn_tp.comm.collectives import all_gather, all_reduce
from axonn_tp.grid.mesh import Mesh


def differing_axes(plane: list[list[float]], gx: int) -> tuple[str, ...]:
    """Along which of x and y the gradients of an x-y plane differ by more than rounding.

    Args:
        plane: norm and a weighted sum of each rank's gradient, in the order of its ranks.
        gx: ranks along x.
    """
    allowed = 1e-2 * max(norm for norm, _ in plane)
    sums = [digest for _, digest in plane]
    found = []
    if any(abs(value - sums[rank - rank % gx]) > allowed for rank, value in enumerate(sums)):
        found.append("x")
    if any(abs(value - sums[rank % gx]) > allowed for rank, value in enumerate(sums)):
        found.append("y")
    return tuple(found)


class _Sum:
    """A hook on one parameter's gradient."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.axes: tuple[str, ...] | None = None

    def __deepcopy__(self, memo: dict) -> _Sum:
        return _Sum(self.mesh)

    def __call__(self, grad: Tensor) -> Tensor:
        if self.axes is None:
            self.axes = self._find(grad)
        if not self.axes:
            return grad
        return all_reduce(grad, self.mesh, "model" if len(self.axes) == 2 else self.axes[0])

    @torch.no_grad()
    def _find(self, grad: Tensor) -> tuple[str, ...] | None:
        wide = grad.detach().double().flatten()
        weights = torch.linspace(1, 2, wide.numel(), dtype=torch.float64, device=wide.device)
        digest = torch.stack([wide.norm(), (wide * weights).sum()])
        plane = all_gather(digest[None], self.mesh, "model")
        if not plane.isfinite().all() or not plane[:, 0].any():
            return None  # an overflow, or nothing yet: the next gradient tells
        return differing_axes(plane.tolist(), self.mesh.grid.gx)


def sum_unnamed(model: nn.Module, mesh: Mesh) -> None:
    """Have the gradients of all parameters that lie whole on every rank of x and y summed where they are of shares."""
    if mesh.size("model") == 1:
        return
    for parameter in model.parameters():
        if parameter.requires_grad and not hasattr(parameter, "axonn_layout"):
            parameter.register_hook(_Sum(mesh))
