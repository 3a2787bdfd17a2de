"""GroupNorm over channels that are split among ranks: exact, wherever the cuts between ranks fall.

Where every rank holds whole groups nothing is communicated. Otherwise one collective a pass: a rank's channels are
pieces of groups, forward gathers the pieces' means and sums of squared deviations and joins them by Chan's formula,
backward gathers the two sums that the gradient needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from axonn_tp.comm.collectives import Collective, all_gather
from axonn_tp.grid.layout import Layout, become
from axonn_tp.grid.mesh import Grid, Mesh
from axonn_tp.grid.share import Share, share_of
from axonn_tp.layers.activation import plain, split_as
from axonn_tp.layers.weight import Split


def check_group_norm(module: nn.GroupNorm, grid: Grid, axes: tuple[str, ...], name: str) -> None:
    """Refuse channels that the axes cannot split.

    Raises:
        ValueError: names the layer and the reason.
    """
    share = share_of(grid, grid.coordinates(0), axes)
    if module.num_channels % share.count:
        sizes = " * ".join(f"g{axis}" for axis in axes)
        raise ValueError(
            f"layer {name}: {module.num_channels} channels do not divide by {sizes} = {share.count}, the ranks that share them; "
            f"choose sizes whose product divides {module.num_channels}"
        )


def group_norm_layout(channels: int, axes: tuple[str, ...]) -> Layout:
    """Layout of a weight or bias: split like the channels."""
    return Layout((channels,), tuple((0, axis) for axis in axes))


def _pieces(channels: int, groups: int, share: Share) -> int:
    """The most groups of which one rank holds a part; 0 where every rank holds whole groups."""
    mine, size = channels // share.count, channels // groups
    if mine % size == 0:
        return 0
    return max((index * mine + mine - 1) // size - index * mine // size + 1 for index in range(share.count))


def group_norm_collectives(
    images: int, channels: int, groups: int, grid: Grid, axes: tuple[str, ...]
) -> list[Collective]:
    """The collectives of one forward and backward pass over `images` on one rank."""
    share = share_of(grid, grid.coordinates(0), axes)
    elements = 2 * images * _pieces(channels, groups, share)
    return [Collective("all_gather", share.group, share.count, elements)] * 2 if elements else []


class _Groups:
    """Who holds what: the groups' pieces, numbered by rank and, on a rank, by group."""

    def __init__(self, channels: int, groups: int, share: Share, device: torch.device) -> None:
        self.share, self.groups = share, groups
        self.pieces = _pieces(channels, groups, share)
        mine = channels // share.count
        channel = torch.arange(channels, device=device)
        self.group_of_channel = channel // (channels // groups)
        first = (channel // mine * mine) // (channels // groups)
        piece = self.group_of_channel - first + channel // mine * self.pieces
        total = share.count * self.pieces
        self.group = channel.new_zeros(total).scatter_(0, piece, self.group_of_channel)
        self.size = channel.new_zeros(total).index_add_(0, piece, torch.ones_like(channel))
        here = slice(share.index * mine, share.index * mine + mine)
        self.my_group, self.my_piece = self.group_of_channel[here], piece[here] - share.index * self.pieces
        self.my_size = self.size[share.index * self.pieces : (share.index + 1) * self.pieces]

    def by_piece(self, of_channel: Tensor) -> Tensor:
        """(B, my channels) → (B, my pieces), summed."""
        return of_channel.new_zeros(len(of_channel), self.pieces).index_add_(1, self.my_piece, of_channel)

    def by_group(self, of_piece: Tensor) -> Tensor:
        """(B, all pieces) → (B, groups), summed."""
        return of_piece.new_zeros(len(of_piece), self.groups).index_add_(1, self.group, of_piece)

    def everyone(self, first: Tensor, second: Tensor, mesh: Mesh) -> tuple[Tensor, Tensor]:
        """Two numbers of each of my pieces (B, my pieces) → those of all pieces (B, all pieces)."""
        gathered = all_gather(torch.stack([first, second])[None], mesh, self.share.group)
        ordered = torch.stack([gathered[place] for place in self.share.order], dim=2)
        return ordered[0].flatten(1), ordered[1].flatten(1)


class _Normalise(torch.autograd.Function):
    """(B, my channels, pixels) → the same."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, eps: float, groups: _Groups, mesh: Mesh) -> Tensor:
        wide = input if input.dtype == torch.float64 else input.float()
        pixels = wide.shape[-1]
        # A rank with fewer pieces than the most has empty ones at the end.
        mean = groups.by_piece(wide.sum(-1)) / (groups.my_size * pixels).clamp(min=1)
        deviation = groups.by_piece((wide - mean[:, groups.my_piece, None]).square().sum(-1))
        means, deviations = groups.everyone(mean, deviation, mesh)
        sizes = groups.size * pixels
        count = groups.by_group(sizes.to(wide.dtype)[None])
        mean = groups.by_group(means * sizes) / count
        apart = means - mean[:, groups.group]
        variance = groups.by_group(deviations + sizes * apart.square()) / count
        scale = (variance + eps).rsqrt()[:, groups.my_group, None]
        normal = ((wide - mean[:, groups.my_group, None]) * scale).to(input.dtype)
        ctx.save_for_backward(normal, scale, count)
        ctx.groups, ctx.mesh = groups, mesh
        return normal

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        normal, scale, count = ctx.saved_tensors
        groups = ctx.groups
        wide, normal = grad.to(scale.dtype), normal.to(scale.dtype)
        sums = (groups.by_piece(wide.sum(-1)), groups.by_piece((wide * normal).sum(-1)))
        total, along = (groups.by_group(t)[:, groups.my_group, None] for t in groups.everyone(*sums, ctx.mesh))
        count = count[:, groups.my_group, None]
        return ((wide - total / count - normal * (along / count)) * scale).to(grad.dtype), None, None, None


class GroupNorm(Split, nn.GroupNorm):
    """`nn.GroupNorm` over a mesh: (B, channels/g, …) → the same; weight and bias split like the channels."""

    axes: tuple[str, ...]

    @classmethod
    def convert(cls, module: nn.GroupNorm, mesh: Mesh, axes: tuple[str, ...]) -> None:
        """Turn an `nn.GroupNorm` that holds its full weight into this class, in place.

        Args:
            module: the layer.
            mesh: the mesh.
            axes: channels are split over these, each within the share of the one before.
        """
        become(module, cls, nn.GroupNorm)
        assert isinstance(module, cls)
        module.axes = axes
        layout = group_norm_layout(module.num_channels, axes)
        module._split(mesh, {"weight": layout, "bias": layout})

    def forward(self, input: Tensor) -> Tensor:
        """Normalise groups of channels of which this rank holds a share.

        Raises:
            ValueError: the input is not this rank's share of the channels.
        """
        share = share_of(self.mesh.grid, self.mesh.coordinates, self.axes)
        if share.count == 1:
            return super().forward(input)
        if input.shape[1] * share.count != self.num_channels:
            raise ValueError(
                f"{self}: the input has {input.shape[1]} channels, expected {self.num_channels} / {share.count} ranks of {self.axes}"
            )
        pieces = _pieces(self.num_channels, self.num_groups, share)
        if not pieces:
            return nn.functional.group_norm(input, self.num_groups // share.count, self.weight, self.bias, self.eps)
        groups = _Groups(self.num_channels, self.num_groups, share, input.device)
        images = plain(input).reshape(*input.shape[:2], -1)
        output = _Normalise.apply(images, self.eps, groups, self.mesh).view(input.shape)
        if self.affine:
            like = (-1,) + (1,) * (input.dim() - 2)
            output = output * self.weight.view(like) + self.bias.view(like)
        return split_as(output, input)
