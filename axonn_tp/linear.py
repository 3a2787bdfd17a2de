"""The fully connected layer as 3D parallel matrix multiplication (dissertation §5.1.1, Algorithm 3).

A *normal* layer contracts over y and splits its output over x, a *transposed* one the other way round. With
W (k × n) stored as torch does, (n × k): forward W = all-gather_z(Ŵ), O = all-reduce_y(I·W); backward
dI = all-reduce_x(dO·Wᵀ), dŴ = reduce-scatter_z(Iᵀ·dO).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_tp.collectives import Collective, copy_to, gather_from, reduce_from, split_to
from axonn_tp.layout import Layout, become
from axonn_tp.mesh import Grid, Mesh
from axonn_tp.weight import SplitWeight


@dataclass(frozen=True)
class LinearSplit:
    """How a linear layer uses the grid.

    Attributes:
        transposed: contract over x and split the output over y.
        parts: the output is this many equal matrices side by side (3 for a fused q, k, v), each split by itself.
        heads: attention heads in each part; they are never cut.
        split_input: the input arrives whole on every rank of the contracted axis.
        gather_output: the output leaves whole on every rank.
        pad: features that an axis does not divide are padded with zeros; needs whole input and output.
        pad_vocabulary: output features are padded, and the padding's logits are −∞.
    """

    transposed: bool = False
    parts: int = 1
    heads: int | None = None
    split_input: bool = False
    gather_output: bool = False
    pad: bool = False
    pad_vocabulary: bool = False

    @property
    def contracted(self) -> str:
        """Axis over which k is split and the output summed."""
        return "x" if self.transposed else "y"

    @property
    def output(self) -> str:
        """Axis over which n is split."""
        return "y" if self.transposed else "x"

    def weight_layout(self, n: int, k: int) -> Layout:
        """Layout of a weight of shape (n, k)."""
        return Layout((n, k), ((0, self.output), (1, self.contracted)), parts=self.parts, over_z=True)

    def bias_layout(self, n: int) -> Layout:
        """Layout of a bias of shape (n,): split like the output it is added to."""
        return Layout((n,)) if self.gather_output else Layout((n,), ((0, self.output),), parts=self.parts)

    def check(self, n: int, k: int, grid: Grid, name: str) -> None:
        """Refuse sizes that the grid cannot split.

        Raises:
            ValueError: names the layer, the size and the axis.
        """
        if n % self.parts:
            raise ValueError(
                f"layer {name}: {n} output features are not {self.parts} equal parts; correct parts in the plan"
            )
        if self.heads and (n // self.parts) % self.heads:
            raise ValueError(
                f"layer {name}: {n // self.parts} output features are not {self.heads} equal heads; correct heads in the plan"
            )
        if self.pad:
            return
        wanted = [(k, "input features", self.contracted)]
        if not self.pad_vocabulary:
            wanted.append((n // self.parts, "output features", self.output))
            if self.heads:
                wanted.insert(0, (self.heads, "heads", self.output))
        for size, what, axis in wanted:
            if size % grid.size(axis):
                raise ValueError(
                    f"layer {name}: {size} {what} do not divide by g{axis} = {grid.size(axis)}, the axis that splits them; "
                    f"choose g{axis} from the divisors of {size}, or name the layer self_contained in the plan"
                )


def linear_collectives(tokens: int, k: int, n: int, grid: Grid, split: LinearSplit | None = None) -> list[Collective]:
    """The collectives of one forward and backward pass on one rank (equations 5.1–5.5), axes of size 1 left out.

    Args:
        tokens: rows of the input on this rank (m / (gz·gdata) of the papers' m).
        k: input features of the whole layer.
        n: output features of the whole layer.
        grid: the grid.
        split: how the layer uses it; a normal layer when None.
    """
    split = split or LinearSplit()
    layout = split.weight_layout(n, k)
    rows, columns = layout.block_shape(grid)
    shard = layout.local_numel(grid)
    contracted, output = split.contracted, split.output
    made = [
        Collective("all_gather", "z", grid.gz, shard),
        Collective("all_reduce", contracted, grid.size(contracted), tokens * rows),
        Collective("all_reduce", output, grid.size(output), tokens * columns),
        Collective("reduce_scatter", "z", grid.gz, shard * grid.gz),
    ]
    if split.gather_output:
        made.append(Collective("all_gather", output, grid.size(output), tokens * rows))
    if split.split_input:
        made.append(Collective("all_gather", contracted, grid.size(contracted), tokens * columns))
    return [collective for collective in made if collective.size > 1]


class Linear(SplitWeight, nn.Linear):  # type: ignore[override]
    """`nn.Linear` over a mesh: same initialisation, same result, each rank holds 1/(gx·gy·gz) of the weight.

    Input (…, k/gy) on every rank of x, output (…, n/gx) on every rank of y; for a transposed layer x and y change
    places. Rows are this rank's tokens.

    Args:
        in_features: k of the whole layer.
        out_features: n of the whole layer.
        bias: whether there is a bias, split like the output.
        mesh: the mesh.
        transposed: see `LinearSplit`.
        parts: see `LinearSplit`.
        heads: see `LinearSplit`.
        device: as in `nn.Linear`.
        dtype: as in `nn.Linear`.

    Raises:
        ValueError: features or heads do not divide by the axis that splits them.
    """

    bias: Any
    split: LinearSplit

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: Mesh,
        transposed: bool = False,
        parts: int = 1,
        heads: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        split = LinearSplit(transposed=transposed, parts=parts, heads=heads)
        split.check(out_features, in_features, mesh.grid, f"Linear({in_features}, {out_features})")
        super().__init__(in_features, out_features, bias, device, dtype)
        self._distribute(mesh, split)

    @classmethod
    def convert(cls, module: nn.Linear, mesh: Mesh, split: LinearSplit) -> None:
        """Turn an `nn.Linear` that holds its full weight into this class, in place."""
        become(module, cls, nn.Linear)
        assert isinstance(module, cls)
        module._distribute(mesh, split)

    def _distribute(self, mesh: Mesh, split: LinearSplit) -> None:
        self.split = split
        n = self.out_features
        self._split(mesh, {"weight": split.weight_layout(n, self.in_features), "bias": split.bias_layout(n)})

    def forward(self, input: Tensor) -> Tensor:
        """(…, k or k/g) → (…, n or n/g), whole or split as `self.split` says."""
        mesh, split = self.mesh, self.split
        shard: Tensor = self._shard()
        padded_n, padded_k = self.layouts["weight"].padded(mesh.grid)
        self._check_width(input)
        if torch.is_autocast_enabled(input.device.type) and input.is_floating_point():
            dtype = torch.get_autocast_dtype(input.device.type)
            input, shard = input.to(dtype), shard.to(dtype)
        if split.split_input:
            input = split_to(F.pad(input, (0, padded_k - self.in_features)), mesh, split.contracted)
        block = self._block(shard)
        bias = None if self.bias is None else self.bias.to(block.dtype)
        fused = mesh.size(split.contracted) == 1 and not split.gather_output
        output = F.linear(copy_to(input, mesh, split.output), block, bias if fused else None)
        output = reduce_from(output, mesh, split.contracted)
        if split.gather_output:
            output = gather_from(output, mesh, split.output)[..., : self.out_features]
        if bias is not None and not fused:
            output = output + bias
        if split.pad_vocabulary and not split.gather_output:
            width = output.shape[-1]
            real = min(max(self.out_features - width * mesh.rank(split.output), 0), width)
            if real < width:
                output = F.pad(output[..., :real], (0, width - real), value=float("-inf"))
        return output

    def _check_width(self, input: Tensor) -> None:
        wanted = self.in_features
        if not self.split.split_input:
            wanted //= self.mesh.size(self.split.contracted)
        if input.shape[-1] != wanted:
            raise ValueError(
                f"{self}: the input has {input.shape[-1]} features, expected {wanted}: "
                f"{'all' if self.split.split_input else f'its share over {self.split.contracted}'} of {self.in_features}"
            )

    def extra_repr(self) -> str:
        """Features of the whole layer and its place on the grid."""
        kind = "transposed" if self.split.transposed else "normal"
        return f"{super().extra_repr()}, {kind}, whole_input={self.split.split_input}, whole_output={self.split.gather_output}"
