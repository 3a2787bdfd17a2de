"""The layers, as the compiler traces them: constants of the grid are read when they are converted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_tp.compiled import graph
from axonn_tp.compiled.casting import computing_dtype
from axonn_tp.grid.mesh import Mesh
from axonn_tp.grid.share import share_of
from axonn_tp.layers import cross_entropy, embedding, layer_norm, linear, rms_norm
from axonn_tp.layers.linear_split import LinearSplit
from axonn_tp.layers.weight import SplitWeight
from axonn_tp.options import Options


@dataclass(frozen=True)
class Block:
    """A layer's part of its weight.

    Attributes:
        mesh: the mesh's name in a graph.
        shape: of the block of this (x, y).
        numel: its elements.
        gathered: whether it lies in shards over z.
    """

    mesh: str
    shape: tuple[int, ...]
    numel: int
    gathered: bool

    @classmethod
    def of(cls, layer: SplitWeight, mesh: Mesh) -> Block:
        """Read it off a layer that has just been split."""
        shape = layer.layouts["weight"].block_shape(mesh.grid)
        return cls(graph.name_of(mesh), shape, torch.Size(shape).numel(), mesh.size("z") > 1)

    def made(self, shard: Tensor | None, cast: bool = True) -> Tensor:
        """The block, differentiable; in autocast's type, unless `cast` is false."""
        assert shard is not None
        shard = shard.to(computing_dtype(shard)) if cast else shard
        if not self.gathered:
            return shard
        flat = graph.gather_weight(shard, self.mesh)
        return flat[: self.numel].view(self.shape)


@dataclass(frozen=True)
class Way:
    """The way of a linear's activations, see `LinearSplit`.

    Attributes:
        contracted: axis over which products are summed.
        output: axis over which the output's features are split.
        width: features of the input that come.
        missing: zeros that an input with all features is filled up with.
        takes_whole: the input has all features.
        gives_whole: the output is to have all features.
        first: number of this rank's first output feature, of a vocabulary that is padded; none otherwise.
    """

    contracted: str
    output: str
    width: int
    missing: int
    takes_whole: bool
    gives_whole: bool
    first: int | None

    @classmethod
    def of(cls, layer: linear.Linear, mesh: Mesh) -> Way:
        """Read it off a layer that has just been split."""
        split, grid, whole = layer.split, mesh.grid, layer.split.takes == "whole"
        padded = layer.layouts["weight"].padded(grid)
        first = None
        if split.pad_vocabulary and split.gives != "whole" and padded[0] > layer.out_features:
            first = padded[0] // mesh.size(split.output) * mesh.rank(split.output)
        return cls(
            split.contracted,
            split.output,
            layer.in_features if whole else layer.in_features // mesh.size(split.contracted),
            padded[1] - layer.in_features if whole else 0,
            whole,
            split.gives == "whole",
            first,
        )


class Linear(linear.Linear):
    """`axonn_tp.Linear` with the reference product; as converted with activations that are replicated."""

    held: Block
    way: Way

    def _distribute(self, mesh: Mesh, split: LinearSplit, options: Options, transposed: bool = False) -> None:
        super()._distribute(mesh, split, options, transposed)
        self.held, self.way = Block.of(self, mesh), Way.of(self, mesh)

    def forward(self, input: Tensor) -> Tensor:
        """(…, k or its share) → (…, n or its share), as `self.split` says.

        Raises:
            ValueError: the input has another width.
        """
        held, way = self.held, self.way
        if input.shape[-1] != way.width:
            raise ValueError(
                f"{type(self).__name__}({self.in_features}, {self.out_features}): the input has {input.shape[-1]} features, expected {way.width}"
            )
        bias = self._parameters["bias"]
        share = input.to(computing_dtype(input))
        if way.takes_whole:
            share = F.pad(share, (0, way.missing)) if way.missing else share
            share = graph.split_to(share, held.mesh, way.contracted)
        share = graph.copy_to(share, held.mesh, way.output)
        output = F.linear(share, held.made(self._parameters["weight"]))
        output = graph.reduce_from(output, held.mesh, way.contracted)
        if way.gives_whole:
            output = graph.gather_from(output, held.mesh, way.output)[..., : self.out_features]
        if bias is not None:
            output = output + bias.to(output.dtype)
        if way.first is not None:
            # Also where none of this rank's columns is padding: graphs are the same on all ranks.
            columns = torch.arange(way.first, way.first + output.shape[-1], device=output.device)
            output = output.masked_fill(columns >= self.out_features, float("-inf"))
        return output


class Embedding(embedding.Embedding):
    """`axonn_tp.Embedding` with the reference sum."""

    held: Block
    first: int
    padding: int | None
    summed: bool
    known: int | None
    """Rows of the serial table, where this rank's may be others or more."""

    def _split(self, mesh: Mesh, layouts: Any) -> None:
        super()._split(mesh, layouts)
        self.held, self.summed = Block.of(self, mesh), mesh.size("x") > 1
        self.known = None if self.held.shape[0] == self.num_embeddings else self.num_embeddings
        self.first, self.padding = self.held.shape[0] * mesh.rank("x"), None
        if self.padding_idx is not None and 0 <= self.padding_idx - self.first < self.held.shape[0]:
            self.padding = self.padding_idx - self.first

    def forward(self, input: Tensor) -> Tensor:
        """Look up the ids that lie in this rank's part of the vocabulary and sum over x."""
        table = self.held.made(self._parameters["weight"], cast=False)
        if self.known is not None:
            embedding.refuse_unknown(input, self.known)
        if not self.summed:
            return F.embedding(input, table, self.padding_idx)
        local = input - self.first
        elsewhere = (local < 0) | (local >= table.shape[0])
        rows = F.embedding(local.masked_fill(elsewhere, 0), table, self.padding)
        return graph.reduce_from(rows.masked_fill(elsewhere[..., None], 0), self.held.mesh, "x")


class LayerNorm(layer_norm.LayerNorm):
    """`axonn_tp.LayerNorm`."""

    name: str
    width: int

    def _split(self, mesh: Mesh, layouts: Any) -> None:
        super()._split(mesh, layouts)
        self.name, self.width = graph.name_of(mesh), self.normalized_shape[0] // mesh.size("y")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise whole rows of which this rank holds 1/gy.

        Raises:
            ValueError: the input is not this rank's share of the features.
        """
        if self.width == self.normalized_shape[0]:
            return super(layer_norm.LayerNorm, self).forward(input)
        if input.shape[-1] != self.width:
            raise ValueError(
                f"LayerNorm({self.normalized_shape[0]}): the input has {input.shape[-1]} features, expected {self.width}"
            )
        output = graph.layer_normalised(input, self.eps, self.name)
        output = output if self.weight is None else output * self.weight
        return output if self.bias is None else output + self.bias


class RMSNorm(rms_norm.RMSNorm):
    """`axonn_tp.layers.rms_norm.RMSNorm`. Mixed into the class of the serial layer."""

    name: str
    width: int

    def _split(self, mesh: Mesh, layouts: Any) -> None:
        super()._split(mesh, layouts)
        self.name, self.width = graph.name_of(mesh), self.features // mesh.size("y")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise whole rows of which this rank holds 1/gy.

        Raises:
            ValueError: the input is not this rank's share of the features.
        """
        if self.width == self.features:
            return super(rms_norm.RMSNorm, self).forward(input)  # type: ignore[misc]
        if input.shape[-1] != self.width:
            raise ValueError(
                f"{type(self).__name__}({self.features}): the input has {input.shape[-1]} features, expected {self.width}"
            )
        epsilon = getattr(self, "variance_epsilon", getattr(self, "eps", None))
        if epsilon is None:
            epsilon = torch.finfo(torch.promote_types(input.dtype, torch.float32)).eps
        output = graph.rms_normalised(input, float(epsilon), self.name)
        weight = self._parameters["weight"]
        return output if weight is None else output * weight


class CrossEntropyLoss(cross_entropy.CrossEntropyLoss):
    """`axonn_tp.CrossEntropyLoss`."""

    name: str
    letters: str
    shares: int

    @classmethod
    def convert(
        cls, module: nn.CrossEntropyLoss, mesh: Mesh, axes: tuple[str, ...] = ("x",), classes: int | None = None
    ) -> None:
        """See `axonn_tp.CrossEntropyLoss.convert`."""
        super().convert(module, mesh, axes, classes)
        assert isinstance(module, cls)
        module.shares = share_of(mesh.grid, mesh.coordinates, axes).count
        module.name, module.letters = graph.name_of(mesh), "".join(axes) if module.shares > 1 else ""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Loss of this rank's rows, reduced as `self.reduction` says; targets equal to `ignore_index` do not count."""
        if not self.letters or not self.takes(input, self.shares):
            return super(cross_entropy.CrossEntropyLoss, self).forward(input, target)
        losses, weights = graph.losses(
            input, target, self.weight, self.classes, self.label_smoothing, self.ignore_index, self.name, self.letters
        )
        if self.reduction == "none":
            return losses
        return losses.sum() if self.reduction == "sum" else losses.sum() / weights.sum()
