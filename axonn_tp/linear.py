"""The fully connected layer as 3D parallel matrix multiplication (dissertation §5.1.1, Algorithm 3).

A *normal* layer contracts over y and splits its output over x, a *transposed* one the other way round. With
W (k × n) stored as torch does, (n × k): forward W = all-gather_z(Ŵ), O = all-reduce_y(I·W); backward
dI = all-reduce_x(dO·Wᵀ), dŴ = reduce-scatter_z(Iᵀ·dO).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_tp.collectives import Collective, gather_from, split_to
from axonn_tp.entry import Entered, SharedInput, enter
from axonn_tp.layout import Layout, become
from axonn_tp.mesh import Grid, Mesh
from axonn_tp.options import Options
from axonn_tp.product import Matmul, Operation, Product, Route
from axonn_tp.weight import SplitWeight


@dataclass(frozen=True)
class LinearSplit:
    """How a linear layer uses the grid.

    Attributes:
        transposed: contract over x and split the output over y.
        parts: the output is this many equal matrices side by side (3 for a fused q, k, v), each split by itself.
        heads: attention heads in each part; they are never cut.
        takes: how the input arrives: ``"whole"`` on every rank, or ``"split"``, ``"features"`` or ``"tokens"`` (see `Route`).
        gives: how the output leaves, in the same words.
        pad: features that an axis does not divide are padded with zeros; needs whole input and output.
        pad_vocabulary: output features are padded, and the padding's logits are −∞.
    """

    transposed: bool = False
    parts: int = 1
    heads: int | None = None
    takes: str = "split"
    gives: str = "split"
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

    @property
    def split_over(self) -> tuple[str, ...]:
        """Axes among whose ranks the output differs."""
        if self.gives == "whole":
            return ()
        return (self.output,) if self.gives == "split" else (self.output, self.contracted)

    def route(self, scattered_input: bool) -> Route:
        """How the product's input and output travel.

        Args:
            scattered_input: the input's features are scattered over the output axis too, as its width tells.
        """
        takes = "tokens" if self.takes == "tokens" else "features" if scattered_input else "split"
        gives = "split" if self.gives == "whole" else self.gives
        return Route(self.contracted, self.output, takes, gives, self.parts)

    def weight_layout(self, n: int, k: int) -> Layout:
        """Layout of a weight of shape (n, k)."""
        # A vocabulary is padded alike in both layouts of activations, so that weights are the same in both.
        even = ((0, self.contracted),) if self.pad_vocabulary else ()
        return Layout((n, k), ((0, self.output), (1, self.contracted)), parts=self.parts, over_z=True, even=even)

    def bias_layout(self, n: int) -> Layout:
        """Layout of a bias of shape (n,): split like the output it is added to."""
        if self.gives == "whole":
            return Layout((n,))
        split: tuple[tuple[int, str], ...] = ((0, self.output),)
        even: tuple[tuple[int, str], ...] = ()
        if self.gives == "features":
            split += ((0, self.contracted),)
        elif self.pad_vocabulary:
            even = ((0, self.contracted),)
        partial = (self.contracted,) if self.gives == "tokens" else ()
        return Layout((n,), split, parts=self.parts, even=even, partial=partial)

    def can_scatter(self, n: int, grid: Grid) -> bool:
        """Whether n output features, and the heads, divide by both axes."""
        ranks = grid.size(self.output) * grid.size(self.contracted)
        heads = self.heads if self.heads is not None else n // self.parts
        return self.pad_vocabulary or ((n // self.parts) % ranks == 0 and heads % ranks == 0)

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


def linear_collectives(
    tokens: int,
    k: int,
    n: int,
    grid: Grid,
    split: LinearSplit | None = None,
    options: Options | None = None,
    enters: bool = True,
) -> list[Collective]:
    """The collectives of one forward and backward pass on one rank (equations 5.1–5.5), axes of size 1 left out.

    Args:
        tokens: rows of the input on the ranks of one x-y plane (m / (gz·gdata) of the papers' m).
        k: input features of the whole layer.
        n: output features of the whole layer.
        grid: the grid.
        split: how the layer uses it; a normal layer when None.
        options: what is gathered again in backward is read of them.
        enters: the input is this layer's own, not that of a layer before it which reads the same tensor.
    """
    split, options = split or LinearSplit(), options or Options()
    layout = split.weight_layout(n, k)
    rows, columns = layout.block_shape(grid)
    shard = layout.local_numel(grid)
    contracted, output = split.contracted, split.output
    route = split.route(split.takes == "features")
    made = [
        *(Collective("all_gather", "z", grid.gz, shard) for _ in range(2 if options.reshard_after_forward else 1)),
        *route.leaving(tokens * rows, grid),
        Collective("reduce_scatter", "z", grid.gz, shard * grid.gz),
    ]
    if split.gives == "whole":
        made.append(Collective("all_gather", output, grid.size(output), tokens * rows))
    if enters:
        made += route.entering(tokens * columns, grid, options.regather_inputs)
    if enters and split.takes == "whole":
        made.append(Collective("all_gather", contracted, grid.size(contracted), tokens * columns))
    return [collective for collective in made if collective.size > 1]


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is the linear of HF's GPT-2 family, which keeps its weight as (in, out)."""
    kinds = ((kind.__module__, kind.__name__) for kind in type(module).__mro__)
    return ("transformers.pytorch_utils", "Conv1D") in kinds


def features(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a module that computes as `nn.Linear` does, else None."""
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return module.in_features, module.out_features
    return (int(module.nx), int(module.nf)) if is_conv1d(module) else None  # type: ignore[arg-type]


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
    operation: Operation
    overlap_all_reduce: bool
    reshard_after_forward: bool
    regather_inputs: bool
    shared: SharedInput | None

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
        self._distribute(mesh, split, Options())

    @classmethod
    def convert(cls, module: nn.Linear, mesh: Mesh, split: LinearSplit, options: Options) -> None:
        """Turn an `nn.Linear` that holds its full weight into this class, in place."""
        size = features(module)
        become(module, cls, nn.Linear)
        assert isinstance(module, cls) and size is not None
        module.in_features, module.out_features = size
        module._distribute(mesh, split, options, transposed=is_conv1d(module))

    def _distribute(self, mesh: Mesh, split: LinearSplit, options: Options, transposed: bool = False) -> None:
        self.split, self.operation, self.shared = split, Matmul(), None
        self.overlap_all_reduce, self.regather_inputs = options.overlap_all_reduce, options.regather_inputs
        self.reshard_after_forward = options.reshard_after_forward
        n = self.out_features
        weight = replace(split.weight_layout(n, self.in_features), transposed=transposed)
        self._split(mesh, {"weight": weight, "bias": split.bias_layout(n)})

    def forward(self, input: Tensor) -> Tensor:
        """(…, k or its share) → (…, n or its share), as `self.split` says."""
        mesh, split = self.mesh, self.split
        route = split.route(self._check_width(input))
        block, bias = self.block(), self.bias
        bias = bias if bias is None else bias.to(block.dtype)
        resharded = self.reshard_after_forward and mesh.size("z") > 1
        if mesh.size("model") == 1 and not resharded and type(self.operation) is Matmul:
            return F.linear(input.to(self.compute_dtype(input)), block, bias)
        whole, source = self._entered(input, route)
        if split.gives == "whole":
            output = Product.apply(whole, block, None, route, self, source)
            output = gather_from(output, mesh, split.output)[..., : self.out_features]
            output = output if bias is None else output + bias
        else:
            output = Product.apply(whole, block, bias, route, self, source)
        mesh.split_over = split.split_over
        return self._without_padding(output) if split.pad_vocabulary and split.gives != "whole" else output

    def _entered(self, input: Tensor, route: Route) -> Entered:
        """The input as the product reads it, entered for this layer or for one before it that reads the same tensor."""
        split, missing = self.split, 0
        dtype = self.compute_dtype(input)
        if split.takes == "whole":
            missing = self.layouts["weight"].padded(self.mesh.grid)[1] - self.in_features

        def make() -> Entered:
            share = input.to(dtype)
            if split.takes == "whole":
                share = F.pad(share, (0, missing)) if missing else share
                share = split_to(share, self.mesh, split.contracted)
            return enter(share, route, self)

        if self.shared is None:
            return make()
        return self.shared(self, input, (split.takes, route.takes, route.output, dtype, missing), make)

    def _without_padding(self, output: Tensor) -> Tensor:
        """Logits of the vocabulary's padding are −∞."""
        width, place = output.shape[-1], self.mesh.rank(self.split.output)
        if self.split.gives == "features":
            place = place * self.mesh.size(self.split.contracted) + self.mesh.rank(self.split.contracted)
        real = min(max(self.out_features - width * place, 0), width)
        return output if real == width else F.pad(output[..., :real], (0, width - real), value=float("-inf"))

    def _check_width(self, input: Tensor) -> bool:
        """Whether the input's features are scattered over the output axis as well.

        Raises:
            ValueError: the width is none that this layer takes.
        """
        split, wanted = self.split, self.in_features
        if split.takes != "whole":
            wanted //= self.mesh.size(split.contracted)
        if input.shape[-1] == wanted:
            return False
        if split.takes in ("split", "features") and input.shape[-1] * self.mesh.size(split.output) == wanted:
            return True
        share = "all" if split.takes == "whole" else f"its share over {split.contracted}"
        raise ValueError(
            f"{self}: the input has {input.shape[-1]} features, expected {wanted}: {share} of {self.in_features}"
        )

    def extra_repr(self) -> str:
        """Features of the whole layer and its place on the grid."""
        kind = "transposed" if self.split.transposed else "normal"
        return f"{super().extra_repr()}, {kind}, takes={self.split.takes}, gives={self.split.gives}"
