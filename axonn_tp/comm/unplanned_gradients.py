"""Gradients of parameters that no plan names and no layer splits: a norm of query heads, a scale in a scattered stream.

Such a parameter is the same on every rank of x and y. Where it is used on shares of an activation, each rank's gradient
is that of its share, and they are to be summed; where it is used on whole activations, all ranks have the whole gradient
already. Nothing about the parameter tells which, but its first gradient does: those of replicas agree to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from axonn_tp.comm.collectives import all_gather, all_reduce
from axonn_tp.grid.mesh import Mesh

GRADIENTS_OF_GRADIENTS = (
    "gradients were asked for with create_graph=True of parameters that layers use on a rank's share of an activation, and what is made of such a gradient "
    "cannot be told to be that of a share or of the whole; leave the pair that uses them out of the plan (for a stream: layout = 'replicated'), or take "
    "gradients of gradients of the model's inputs alone"
)
BINS = 64
_CHUNK = 2**20


def sketch(gradient: Tensor) -> Tensor:
    """64 signed sums of a gradient's elements, whose distance from another's is near that of the gradients: float64.

    The gradient itself where it has no more elements; else a random projection (Charikar et al. 2002, count sketch), the same
    on every rank.
    """
    found = torch.zeros(BINS, dtype=torch.float64, device=gradient.device)
    generator = torch.Generator().manual_seed(0)
    gradient = gradient.to_dense()
    gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    for part in gradient.detach().flatten().split(_CHUNK):
        rows = nn.functional.pad(part.double(), (0, -part.numel() % BINS)).view(-1, BINS)
        signs = torch.randint(2, (len(rows),), generator=generator, dtype=torch.float64) * 2 - 1
        found += signs.to(rows.device) @ rows
    return found


def differing_axes(plane: Tensor, gx: int, allowed: Mapping[str, float] | None = None) -> tuple[str, ...]:
    """Along which of x and y the gradients of an x-y plane differ by more than rounding.

    Args:
        plane: a sketch of each rank's gradient, in the order of its ranks.
        gx: ranks along x.
        allowed: by axis, the part of the largest that is taken for rounding; 1e-2 where it is not told.
    """
    by, allowed = plane.view(-1, gx, plane.shape[1]), allowed or {}
    largest = plane.norm(dim=1).max()
    far = {"x": (by - by[:, :1]).norm(dim=2), "y": (by - by[:1]).norm(dim=2)}
    return tuple(axis for axis, distances in far.items() if bool((distances > allowed.get(axis, 1e-2) * largest).any()))


class _Sum:
    """A hook on one parameter's gradient.

    Attributes:
        axes: along which ranks have other gradients; None until one tells.
        used: along which the parameter was seen to meet other shares.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.axes: tuple[str, ...] | None = None
        self.used: set[str] = set()

    def __call__(self, grad: Tensor) -> Tensor:
        if self.axes is None:
            self.axes = self._find(grad)
        if not self.axes:
            return grad
        if torch.is_grad_enabled():
            raise ValueError(GRADIENTS_OF_GRADIENTS)
        return all_reduce(grad, self.mesh, "model" if len(self.axes) == 2 else self.axes[0])

    @torch.no_grad()
    def _find(self, grad: Tensor) -> tuple[str, ...] | None:
        plane = all_gather(sketch(grad)[None], self.mesh, "model")
        if not plane.isfinite().all() or not plane.any():
            return None  # an overflow, or nothing yet: the next gradient tells
        # Gradients of few numbers may be near each other by chance; in 16 bits they may be the same.
        near = 8 * torch.finfo(grad.dtype).eps if grad.dtype in (torch.float32, torch.float64) else -1.0
        sizes = {axis: self.mesh.size(axis) for axis in ("x", "y")}
        allowed = {axis: near for axis in self.used if sizes[axis] > 1}
        return tuple(axis for axis in differing_axes(plane, sizes["x"], allowed) if sizes[axis] > 1)


_sums: MutableMapping[Tensor, _Sum] = WeakTensorKeyDictionary()


def _sum(parameter: Tensor | None, mesh: Mesh) -> None:
    """Watch a parameter; one that is frozen may be trained later."""
    if parameter is None or parameter in _sums or hasattr(parameter, "axonn_layout") or not _trainable(parameter):
        return
    trained = parameter.requires_grad
    parameter.requires_grad_(True)
    _sums[parameter] = found = _Sum(mesh)
    parameter.register_hook(found)
    parameter.requires_grad_(trained)


def _trainable(parameter: Tensor) -> bool:
    return parameter.is_leaf and (parameter.is_floating_point() or parameter.is_complex())


class _Kept:
    """Lies in a module whose own parameters are watched, so that those of its copies are, too.

    Args:
        module: it.
        mesh: the mesh.
    """

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        self._mesh = mesh
        self.watch(module)

    def watch(self, module: nn.Module) -> None:
        """Watch the module's parameters, those that have taken another's place too."""
        self._parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
        for parameter in self._parameters:
            _sum(parameter, self._mesh)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        made = _Kept(nn.Module(), self._mesh)
        made._parameters = [memo[id(parameter)] for parameter in self._parameters if id(parameter) in memo]
        for parameter in made._parameters:
            _sum(parameter, self._mesh)
        return made

    def __reduce__(self) -> tuple[Any, tuple]:
        return _nothing, ()


def _nothing() -> None:
    """Nothing, for a module that was written to a file, and is read without a mesh."""


def _loaded(module: nn.Module, keys: Any) -> None:
    kept = module.__dict__.get("axonn_sums")
    if kept is not None:
        kept.watch(module)


def sum_unnamed(model: nn.Module, mesh: Mesh) -> None:
    """Have the gradients of all parameters that lie whole on every rank of x and y summed where they are of shares."""
    if mesh.size("model") == 1:
        return
    for module in model.modules():
        if "axonn_sums" in module.__dict__:
            _loaded(module, None)
        elif any(p is not None and not hasattr(p, "axonn_layout") for p in module._parameters.values()):
            module.axonn_sums = _Kept(module, mesh)  # type: ignore[assignment]
            module.register_load_state_dict_post_hook(_loaded)


def used_on_shares(parameter: Tensor, axes: Iterable[str], mesh: Mesh) -> None:
    """Note that a parameter met shares that differ along axes; it may have come to the model after the model was split."""
    _sum(parameter, mesh)
    found = _sums.get(parameter)
    if found is not None and found.axes is None:
        found.used.update(axes)
