"""An expert split over the tensor ranks: Megatron's column and row linears along one axis of `axonn_tp`.

Where an expert does nothing with its input but multiply it by split weights, and what it returns is such a product, the
tokens need not be whole on the way in and out: the gather that column linears need comes with the end of duplicate token
dropping, and the all-reduce that row linears need and the drop after it are one reduce-scatter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from axonn_tp import Grid, LayerPlan, auto_plan
from axonn_tp.comm.collectives import copy_to, reduce_from
from axonn_tp.grid.layout import become
from axonn_tp.grid.mesh import Axes


class Column(nn.Linear):
    """A linear that has a share of the output features; its input is whole, or gathered by the layer around the expert."""

    groups: Axes
    splits: dict[str, tuple[int, int]]
    """For each parameter the dim that is split over the tensor ranks, and in how many equal parts, each split by itself."""
    sums: bool
    """True if this layer itself sums its input's gradient over the tensor ranks."""

    def forward(self, input: Tensor) -> Tensor:
        """Share of the output."""
        return F.linear(self.enter(input), self.weight, self.bias)

    def enter(self, input: Tensor) -> Tensor:
        """Return the input that the weight multiplies."""
        return copy_to(input, self.groups, "tensor") if self.sums else input


class Row(nn.Linear):
    """A linear that has a share of the input features; its bias is whole."""

    groups: Axes
    splits: dict[str, tuple[int, int]]
    sums: bool
    """True if this layer itself sums its output over the tensor ranks, and adds its bias."""

    def forward(self, input: Tensor) -> Tensor:
        """The output, or this rank's part of the sum."""
        return self.leave(F.linear(input, self.weight), self.bias)

    def leave(self, product: Tensor, bias: Tensor | None) -> Tensor:
        """Sum the product with the weight over the ranks that split it, and add the bias, of which there may be one for each row."""
        # As a linear under autocast; the sums need the same type on the rank that adds the bias and on the others.
        bias = None if bias is None else bias.to(product.dtype)
        if self.sums:
            product = reduce_from(product, self.groups, "tensor")
            return product if bias is None else product + bias
        return product if bias is None else _AddOnce.apply(product, bias, self.groups.rank("tensor") == 0)


class _AddOnce(torch.autograd.Function):
    """A bias that one rank adds, before a sum over ranks of which each gets the whole gradient back: so has each the bias's."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, bias: Tensor, here: bool) -> Tensor:
        ctx.shape = bias.shape
        return product + bias if here else product.view_as(product)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, grad.sum_to_size(ctx.shape), None


@dataclass(frozen=True)
class ExpertPlan:
    """The layers that split an expert, and the kind of each.

    Attributes:
        layers: column and row linears by name; empty: the expert stays whole on every tensor rank.
        fused: the layer around the expert must gather the tokens, summing their gradients, and sum what the expert returns.
    """

    layers: dict[str, LayerPlan]
    fused: bool = False


def plan_expert(expert: nn.Module, features: int, groups: Axes, fuse: bool) -> ExpertPlan:
    """Find an expert's pairs of column and row linears.

    Args:
        expert: works token by token on (..., M).
        features: of a token, M.
        groups: the axes; "tensor" counts.
        fuse: whether to leave the sums to the layer around the expert, where the expert allows it.
    """
    size = groups.size("tensor")
    weight = next(expert.parameters(), None)
    if size == 1 or weight is None:
        return ExpertPlan({})
    example = torch.zeros(1, 1, 3, features, dtype=weight.dtype)
    plan, _ = auto_plan(expert, Grid(gx=size), (example,))
    linears = {
        name
        for name, module in expert.named_modules()
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    }
    layers = {name: layer for name, layer in plan.items() if name in linears and layer.kind in ("normal", "transposed")}
    kinds = {layer.kind for layer in layers.values()}
    if len(kinds) < 2:
        return ExpertPlan({})
    return ExpertPlan(layers, fuse and _direct(expert, example.to(weight.device), layers))


def split_expert(expert: nn.Module, plan: ExpertPlan, groups: Axes) -> None:
    """Give an expert, which is the same on all tensor ranks, this rank's share of its linears, in place."""
    for name, layer in plan.layers.items():
        _convert(expert.get_submodule(name), layer, groups, sums=not plan.fused)  # type: ignore[arg-type]


def _convert(layer: nn.Linear, plan: LayerPlan, groups: Axes, sums: bool) -> None:
    size, rank, column = groups.size("tensor"), groups.rank("tensor"), plan.kind == "normal"
    become(layer, Column if column else Row, nn.Linear)
    splits: dict[str, tuple[int, int]] = {}
    layer.groups, layer.sums, layer.splits = groups, sums, splits  # type: ignore[assignment]
    for name, parameter in layer.named_parameters(recurse=False):
        if column or name == "weight":
            dim = 0 if column else 1
            pieces = [part.chunk(size, dim)[rank] for part in parameter.data.chunk(plan.parts, dim)]
            parameter.data = torch.cat(pieces, dim).contiguous()
            splits[name] = dim, plan.parts
            parameter.ted_split = True  # type: ignore[attr-defined]
    if column:
        layer.out_features //= size
    else:
        layer.in_features //= size


class _Uses(TorchFunctionMode):
    """Notes whether anything but a linear reads a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor, self.others = tensor, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not F.linear and any(value is self.tensor for value in (*args, *kwargs.values())):
            name = getattr(function, "__name__", "")
            self.others += name not in ("__get__", "size", "dim", "numel")
        return function(*args, **kwargs)


def _direct(expert: nn.Module, example: Tensor, layers: dict[str, LayerPlan]) -> bool:
    """True if the column linears alone, and all of them, read the expert's input, and its output is that of the only row linear."""
    read, gave, handles = [], [], []
    for name, plan in layers.items():
        layer = expert.get_submodule(name)
        if plan.kind == "normal":
            handles.append(layer.register_forward_pre_hook(lambda _, given: read.append(given[0])))
        else:
            handles.append(layer.register_forward_hook(lambda _, given, out: gave.append(out)))
    with torch.no_grad(), _Uses(example) as uses:
        output = expert(example)
    for handle in handles:
        handle.remove()
    output = output[0] if isinstance(output, tuple) else output
    columns = sum(plan.kind == "normal" for plan in layers.values())
    enters = len(read) == columns and all(given is example for given in read) and not uses.others
    return enters and len(gave) == 1 and gave[0] is output
