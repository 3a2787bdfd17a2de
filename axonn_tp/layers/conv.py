"""Convolutions as 3D parallel products: input channels are k, output channels n (paper 003, §III-B).

Every position of the image is a token, and the kernel's positions ride along with the weight's block. `nn.Conv1d`,
`Conv2d`, `Conv3d` and their transposed kin are one class here, mixed into the serial layer's own.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from axonn_tp.comm.collectives import Collective, gather_from, split_to
from axonn_tp.grid.layout import Layout, become
from axonn_tp.grid.mesh import Grid, Mesh
from axonn_tp.layers.activation import plain, split_among
from axonn_tp.layers.entry import enter
from axonn_tp.layers.linear_split import LinearSplit
from axonn_tp.layers.product import Operation, Product
from axonn_tp.layers.weight import SplitWeight
from axonn_tp.options import Options


def is_conv(module: nn.Module) -> bool:
    """A convolution of torch's own whose channels all see each other, and whose weight is its own parameter."""
    if not isinstance(module, _ConvNd) or type(module).forward.__module__ != "torch.nn.modules.conv":
        return False
    return module.groups == 1 and module._parameters.keys() >= {"weight", "bias"}


def check_conv(module: _ConvNd, split: LinearSplit, grid: Grid, name: str) -> None:
    """Refuse what the grid cannot split.

    Raises:
        ValueError: names the layer, the size and the axis.
    """
    if module.groups != 1:
        raise ValueError(
            f"layer {name}: a convolution of {module.groups} groups is not one product of channels; name it replicated in the plan"
        )
    if isinstance(module, _ConvTransposeNd) and split.parts > 1:
        raise ValueError(
            f"layer {name}: parts = {split.parts} is for layers whose weight has output channels first; leave it out of the plan"
        )
    split.check(module.out_channels, module.in_channels, grid, name)


def conv_layout(module: _ConvNd, split: LinearSplit) -> Layout:
    """Layout of the weight, (n, k, …) or, of a transposed convolution, (k, n, …)."""
    layout = replace(split.weight_layout(module.out_channels, module.in_channels), shape=tuple(_shape(module)))
    if isinstance(module, _ConvTransposeNd):
        layout = replace(layout, split=tuple((1 - dim, axis) for dim, axis in layout.split))
    return layout


def _shape(module: _ConvNd) -> tuple[int, ...]:
    channels = (module.out_channels, module.in_channels)
    return (*(reversed(channels) if isinstance(module, _ConvTransposeNd) else channels), *module.kernel_size)


def conv_collectives(
    module: _ConvNd, positions: int, made: int, grid: Grid, split: LinearSplit, options: Options | None = None
) -> list[Collective]:
    """The collectives of one forward and backward pass on one rank (equations 5.1–5.5), axes of size 1 left out.

    Args:
        module: the serial layer.
        positions: images × height × width of the input on the ranks of one x-y plane.
        made: images × height × width of the output.
        grid: the grid.
        split: how the layer uses it.
        options: what is gathered again in backward is read of them.
    """
    options = options or Options()
    layout = conv_layout(module, split)
    block, shard = layout.block_shape(grid), layout.local_numel(grid)
    columns, rows = block[:2] if isinstance(module, _ConvTransposeNd) else (block[1], block[0])
    route = split.route(split.takes == "features")
    found = [
        *(Collective("all_gather", "z", grid.gz, shard) for _ in range(2 if options.reshard_after_forward else 1)),
        *route.leaving(made * rows, grid),
        *route.entering(positions * columns, grid, options.regather_inputs),
        Collective("reduce_scatter", "z", grid.gz, shard * grid.gz),
    ]
    if split.gives == "whole":
        found.append(Collective("all_gather", split.output, grid.size(split.output), made * rows))
    if split.takes == "whole":
        found.append(Collective("all_gather", split.contracted, grid.size(split.contracted), positions * columns))
    return [collective for collective in found if collective.size > 1]


def positions_made(module: _ConvNd, positions: int) -> int:
    """Positions of the output where padding keeps the image's size but for the stride."""
    stride = math.prod(module.stride)
    return positions * stride if isinstance(module, _ConvTransposeNd) else positions // stride


class Convolution:
    """A convolution as the product's operation: (images, channels, …) with torch's options.

    Args:
        module: the layer whose options these are.
    """

    def __init__(self, module: _ConvNd) -> None:
        dims = len(module.kernel_size)
        self.features, self.tokens = -dims - 1, -dims - 2
        self.upward = isinstance(module, _ConvTransposeNd)
        around = list(module._reversed_padding_repeated_twice)
        even = all(before == after for before, after in zip(around[::2], around[1::2], strict=True))
        # What torch's kernel does not do itself is padded before: other values than zero, unlike sides of "same".
        self.mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        self.around = [] if even and self.mode == "constant" else around
        padding = list(module.padding) if self.upward else around[-2::-2]
        self.options: tuple[Any, ...] = (
            list(module.stride),
            [0] * dims if self.around else padding,
            list(module.dilation),
            self.upward,
            list(module.output_padding),
            1,
        )

    def _pad(self, input: Tensor) -> Tensor:
        return F.pad(input, self.around, self.mode) if self.around else input

    def _gradients(self, grad: Tensor, input: Tensor, weight: Tensor, of_input: bool) -> Tensor:
        wanted = [of_input, not of_input, False]
        found = torch.ops.aten.convolution_backward(grad, input, weight, None, *self.options, wanted)
        return found[0 if of_input else 1]

    def once(self) -> Convolution:  # noqa: D102
        return self

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output."""
        return torch.convolution(self._pad(input), weight, bias, *self.options)

    def spread(self, bias: Tensor) -> Tensor:
        """The bias as it is added to an output."""
        return bias.view(-1, *(1 for _ in range(-self.features - 1)))

    def grad_input(self, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of an input of this shape."""
        # Of the input only the shape is read, so nothing is allocated for its values.
        input = grad.new_empty(1).expand(shape)
        if not self.around:
            return self._gradients(grad, input, weight, True)
        with torch.enable_grad():
            input = input.detach().requires_grad_()
            padded = self._pad(input)
        return torch.autograd.grad(padded, input, self._gradients(grad, padded.detach(), weight, True))[0]

    def grad_weight(self, grad: Tensor, input: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of a weight of this shape."""
        return self._gradients(grad, self._pad(input), grad.new_empty(1).expand(shape), False)


class Conv(SplitWeight):
    """A convolution over a mesh: (images, k or its share, …) → (images, n or its share, …), each rank with its images.

    Mixed into the class of the serial layer.
    """

    bias: Any
    in_channels: int
    out_channels: int
    split: LinearSplit
    operation: Operation
    overlap_all_reduce: bool
    reshard_after_forward: bool
    regather_inputs: bool

    @classmethod
    def convert(cls, module: _ConvNd, mesh: Mesh, split: LinearSplit, options: Options) -> None:
        """Turn a convolution that holds its full weight into this class, in place."""
        layouts = {"weight": conv_layout(module, split), "bias": split.bias_layout(module.out_channels)}
        become(module, cls, _ConvNd)
        assert isinstance(module, cls)
        module.split, module.operation = split, Convolution(module)
        module.overlap_all_reduce, module.regather_inputs = options.overlap_all_reduce, options.regather_inputs
        module.reshard_after_forward = bool(options.reshard_after_forward)
        module._split(mesh, layouts)

    def forward(self, input: Tensor, output_size: None = None) -> Tensor:
        """The convolution of this rank's images, channels whole or split as `self.split` says.

        Raises:
            ValueError: the channels are not those that this layer takes, or an `output_size` is given.
        """
        if output_size is not None:
            raise ValueError(
                f"{self}: output_size = {output_size} is not known to a split layer; set output_padding instead"
            )
        dim = self.operation.features
        if input.dim() == -dim:
            return self.forward(input[None])[0]
        scattered_input = self._check_channels(input)
        input = plain(input).to(self.compute_dtype(input))
        block, bias = self.block(), self.bias
        bias = bias if bias is None else bias.to(block.dtype)
        if self.mesh.size("model") == 1 and not (self.reshard_after_forward and self.mesh.size("z") > 1):
            return self.operation.forward(input, block, bias)
        output = self._product(input, block, bias, scattered_input)
        features = self.split.features(self.out_channels, dim)
        return split_among(output, self.mesh, self.split.split_over, features=features)

    def _product(self, input: Tensor, block: Tensor, bias: Tensor | None, scattered_input: bool) -> Tensor:
        mesh, split, dim = self.mesh, self.split, self.operation.features
        if split.takes == "whole":
            missing = -self.in_channels % mesh.size(split.contracted)
            input = split_to(F.pad(input, [0, 0] * (-dim - 1) + [0, missing]), mesh, split.contracted, dim)
        route = split.route(scattered_input)
        whole, source = enter(input, route, self)
        if split.gives != "whole":
            return Product.apply(whole, block, bias, route, self, source)
        output = gather_from(Product.apply(whole, block, None, route, self, source), mesh, split.output, dim)
        output = output.narrow(dim, 0, self.out_channels)
        return output if bias is None else output + self.operation.spread(bias)

    def _check_channels(self, input: Tensor) -> bool:
        """True if the input's channels are scattered over the output axis as well.

        Raises:
            ValueError: the channels are none that this layer takes.
        """
        split, wanted, channels = self.split, self.in_channels, input.shape[self.operation.features]
        if split.takes != "whole":
            wanted //= self.mesh.size(split.contracted)
        if channels == wanted:
            return False
        if split.takes != "whole" and channels * self.mesh.size(split.output) == wanted:
            return True
        share = "all" if split.takes == "whole" else f"its share over {split.contracted}"
        raise ValueError(f"{self}: the input has {channels} channels, expected {wanted}: {share} of {self.in_channels}")

    def extra_repr(self) -> str:
        """The serial layer's, and its place on the grid."""
        kind = "transposed" if self.split.transposed else "normal"
        return f"{super().extra_repr()}, {kind}, takes={self.split.takes}, gives={self.split.gives}"
