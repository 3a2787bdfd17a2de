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

_BINS = 64
_CHUNK = 2**20


def sketch(gradient: Tensor) -> Tensor:
    """64 signed sums of a gradient's elements, whose distance from another's is near that of the gradients: float64.

    The gradient itself where it has no more elements; else a random projection (Charikar et al. 2002, count sketch), the same
    on every rank.
    """
    found = torch.zeros(_BINS, dtype=torch.float64, device=gradient.device)
    generator = torch.Generator().manual_seed(0)
    for part in gradient.detach().flatten().split(_CHUNK):
        rows = nn.functional.pad(part.double(), (0, -part.numel() % _BINS)).view(-1, _BINS)
        signs = torch.randint(2, (len(rows),), generator=generator, dtype=torch.float64) * 2 - 1
        found += signs.to(rows.device) @ rows
    return found


def differing_axes(plane: Tensor, gx: int) -> tuple[str, ...]:
    """Along which of x and y the gradients of an x-y plane differ by more than rounding.

    Args:
        plane: a sketch of each rank's gradient, in the order of its ranks.
        gx: ranks along x.
    """
    by = plane.view(-1, gx, plane.shape[1])
    allowed = 1e-2 * plane.norm(dim=1).max()
    far = {"x": (by - by[:, :1]).norm(dim=2), "y": (by - by[:1]).norm(dim=2)}
    return tuple(axis for axis, distances in far.items() if bool((distances > allowed).any()))


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
        plane = all_gather(sketch(grad)[None], self.mesh, "model")
        if not plane.isfinite().all() or not plane.any():
            return None  # an overflow, or nothing yet: the next gradient tells
        return differing_axes(plane, self.mesh.grid.gx)


def sum_unnamed(model: nn.Module, mesh: Mesh) -> None:
    """Have the gradients of all parameters that lie whole on every rank of x and y summed where they are of shares."""
    if mesh.size("model") == 1:
        return
    for parameter in model.parameters():
        if parameter.requires_grad and not hasattr(parameter, "axonn_layout"):
            parameter.register_hook(_Sum(mesh))
