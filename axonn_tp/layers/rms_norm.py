"""RMSNorm over features that are split over an axis: exact, one all-reduce forward and one backward.

Takes `nn.RMSNorm` and modules of the same form that model libraries bring along (Llama's: a weight and a
`variance_epsilon`), which are recognised by what they compute.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from axonn_tp.comm.collectives import Collective, all_reduce
from axonn_tp.grid.layout import Layout, become
from axonn_tp.grid.mesh import Grid, Mesh
from axonn_tp.layers.activation import plain, split_as
from axonn_tp.layers.weight import Split


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _epsilon(module: nn.Module, dtype: torch.dtype) -> float:
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return torch.finfo(dtype).eps if epsilon is None else float(epsilon)  # type: ignore[arg-type]


def is_rms_norm(module: nn.Module, in_own_type: bool = False) -> bool:
    """True if a module is an RMSNorm over its last dim: torch's, or one that computes the same from a weight alone.

    Args:
        module: any module.
        in_own_type: one that rounds to float32 although its weight is of float64 is none.
    """
    if isinstance(module, nn.RMSNorm):
        return type(module).forward is nn.RMSNorm.forward and len(module.normalized_shape) == 1
    weight = module._parameters.get("weight")
    if (
        weight is None
        or weight.dim() != 1
        or len(list(module.parameters())) != 1
        or not (hasattr(module, "variance_epsilon") or isinstance(getattr(module, "eps", None), float))
    ):
        return False
    probe = copy.deepcopy(module).to_empty(device="cpu").double()
    (own,) = probe.parameters()
    generator = torch.Generator().manual_seed(0)
    rows, scale = torch.rand(2, 2, len(weight), generator=generator, dtype=torch.float64, device="cpu") + 0.5
    with torch.no_grad():
        own.copy_(scale[0])
        try:
            got = probe(rows)
        except Exception:
            return False  # it takes something else
    expected = rows * (rows.square().mean(-1, keepdim=True) + _epsilon(module, rows.dtype)).rsqrt() * scale[0]
    exact = in_own_type and weight.dtype == torch.float64
    if not isinstance(got, Tensor) or got.shape != expected.shape:
        return False
    return torch.allclose(got.double(), expected, rtol=1e-12 if exact else 1e-5, atol=0 if exact else 1e-8)


def check_rms_norm(module: nn.Module, grid: Grid, name: str) -> None:
    """Refuse a module that is no RMSNorm, or that y cannot split.

    Raises:
        ValueError: names the layer and the reason.
    """
    if not is_rms_norm(module):
        raise ValueError(
            f"layer {name}: a {type(module).__name__} does not compute an RMSNorm over one dim; name it replicated in the plan"
        )
    features = _features(module)
    if features % grid.gy:
        raise ValueError(
            f"layer {name}: {features} features do not divide by gy = {grid.gy}, the axis that splits them; "
            f"choose gy from the divisors of {features}"
        )


def _features(module: nn.Module) -> int:
    if isinstance(module, nn.RMSNorm):
        return module.normalized_shape[0]
    weight = module._parameters["weight"]
    assert weight is not None
    return len(weight)


def rms_norm_layout(features: int, scattered: bool = False) -> Layout:
    """Layout of the weight: split like the features; where tokens are scattered over x, every x sees others."""
    return Layout((features,), ((0, "y"),), partial=("x",) if scattered else ())


def rms_norm_collectives(tokens: int, grid: Grid) -> list[Collective]:
    """The collectives of one forward and backward pass on one rank."""
    return [Collective("all_reduce", "y", grid.gy, tokens)] * 2 if grid.gy > 1 else []


class Normalise(torch.autograd.Function):
    """Rows of which each rank of y holds a part, by their mean square: input, eps and mesh in."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, eps: float, mesh: Mesh) -> Tensor:  # noqa: D102
        wide = _wide(input)
        squares = all_reduce(wide.square().sum(-1), mesh, "y")
        scale = (squares / (wide.shape[-1] * mesh.size("y")) + eps).rsqrt()[..., None]
        normal = wide * scale
        ctx.mesh, ctx.dtype = mesh, input.dtype
        result = normal.to(input.dtype)
        ctx.save_for_backward(result, scale)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: D102
        normal, scale = ctx.saved_tensors
        wide, normal = grad.to(scale.dtype), normal.to(scale.dtype)
        along = all_reduce((wide * normal).sum(-1), ctx.mesh, "y") / (grad.shape[-1] * ctx.mesh.size("y"))
        return ((wide - normal * along[..., None]) * scale).to(ctx.dtype), None, None


class RMSNorm(Split):
    """An RMSNorm over a mesh: (…, features/gy) → the same, weight split over y. Mixed into the class of the serial layer."""

    features: int

    @classmethod
    def convert(cls, module: nn.Module, mesh: Mesh, scattered: bool = False) -> None:
        """Turn an RMSNorm that holds its full weight into this class, in place; `scattered`: tokens are, over x."""
        features = _features(module)
        become(module, cls, nn.Module)
        assert isinstance(module, cls)
        module.features = features
        module._split(mesh, {"weight": rms_norm_layout(features, scattered)})

    def forward(self, input: Tensor) -> Tensor:
        """Normalise whole rows of which this rank holds 1/gy.

        Raises:
            ValueError: the input is not this rank's share of the features.
        """
        with self._on_shares():
            return self._normalised(input)

    def _normalised(self, input: Tensor) -> Tensor:
        gy = self.mesh.size("y")
        if gy == 1:
            return super().forward(input)
        if input.shape[-1] * gy != self.features:
            raise ValueError(f"{self}: the input has {input.shape[-1]} features, expected {self.features} / gy = {gy}")
        share = plain(input)
        output = Normalise.apply(share, _epsilon(self, _wide(share[:0]).dtype), self.mesh)
        weight = self._parameters["weight"]
        return split_as(output if weight is None else output * weight, input)

    def extra_repr(self) -> str:
        """Features of the whole layer."""
        return f"{self.features}"
