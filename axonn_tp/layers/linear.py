"""The fully connected layer as 3D parallel matrix multiplication (dissertation §5.1.1, Algorithm 3).

A *normal* layer contracts over y and splits its output over x, a *transposed* one the other way round. With
W (k × n) stored as torch does, (n × k): forward W = all-gather_z(Ŵ), O = all-reduce_y(I·W); backward
dI = all-reduce_x(dO·Wᵀ), dŴ = reduce-scatter_z(Iᵀ·dO).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_tp.comm.collectives import gather_from, split_to
from axonn_tp.grid.layout import become
from axonn_tp.grid.mesh import Mesh
from axonn_tp.layers.activation import plain, split_among, split_of, unwatched
from axonn_tp.layers.boundary import whole_activation
from axonn_tp.layers.entry import Entered, SharedInput, enter
from axonn_tp.layers.linear_split import LinearSplit, features, is_conv1d
from axonn_tp.layers.product import Matmul, Operation, Product, Route, filled
from axonn_tp.layers.tokens import REMEDY, Tokens
from axonn_tp.layers.weight import SplitWeight
from axonn_tp.options import Options


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
        self.reshard_after_forward = bool(options.reshard_after_forward)
        n = self.out_features
        weight = replace(split.weight_layout(n, self.in_features), transposed=transposed)
        self._split(mesh, {"weight": weight, "bias": split.bias_layout(n)})

    def forward(self, input: Tensor) -> Tensor:
        """(…, k or its share) → (…, n or its share), as `self.split` says; a layer that takes whole inputs gathers a share.

        Raises:
            ValueError: the input is not what this layer takes.
        """
        if self.split.takes == "whole" and split_of(input) is not None:
            whole = whole_activation(input, self.mesh, self.in_features)
            input = whole.flatten(0, -2) if input.dim() < whole.dim() else whole
        elif self._alone(input):
            input = self._share(input)
        tokens = self._tokens(input)
        with unwatched(), self._on_shares():
            output = self.multiply(input, self.bias, tokens)
        if self.split.gives != "tokens" or self.mesh.size(self.split.contracted) == 1:
            kept = tokens if tokens is not None and input.dim() == 2 < tokens.dims else None
            tokens = None if kept is None else Tokens(kept.whole, 1, kept.dims)
        elif tokens is None:
            tokens = Tokens(input.shape[-2], self.mesh.size(self.split.contracted), input.dim())
        else:
            tokens = Tokens(tokens.whole, self.mesh.size(self.split.contracted), tokens.dims)
        split, features = self.split, self.split.features(self.out_features)
        return split_among(output, self.mesh, split.split_over, tokens, split.pad_vocabulary, features)

    def _alone(self, input: Tensor) -> bool:
        """True if a script calls a model's layer by itself, as a head, on what is whole: by its width, and where tokens are shared by what gave it."""
        mesh, split = self.mesh, self.split
        shares_tokens = split.takes == "tokens" and mesh.size(split.output) > 1
        return (
            (shares_tokens or mesh.size(split.contracted) > 1)
            and split.takes != "whole"
            and split_of(input) is None
            and input.shape[-1] == self.in_features
            and (hasattr(input, "axonn_gathered") or not shares_tokens)
            and hasattr(self, "axonn_name")
            and not self.gathers.in_forward
        )

    def _share(self, whole: Tensor) -> Tensor:
        """This rank's share of a whole input."""
        mesh, split, tokens = self.mesh, self.split, None
        rows = plain(whole)
        if split.takes == "tokens" and mesh.size(split.output) > 1:
            tokens = Tokens(whole.shape[-2], mesh.size(split.output), whole.dim())
            rows = split_to(filled(rows, -2, tokens.ranks), mesh, split.output, -2)
        over = (split.contracted,) if tokens is None else (split.contracted, split.output)
        return split_among(split_to(rows, mesh, split.contracted, -1), mesh, over, tokens)

    def _tokens(self, input: Tensor) -> Tokens | None:
        """The place of the input's tokens, where they are scattered or the input has been flattened.

        Raises:
            ValueError: they are scattered, and their number is unknown.
        """
        found = split_of(input)
        tokens = found.tokens if found is not None else None
        if self.split.takes == "tokens" and self.mesh.size(self.split.output) > 1:
            if tokens is None or tokens.ranks == 1:
                raise ValueError(
                    f"{self}: an input of shape {tuple(input.shape)} does not tell of how many tokens it is a share, as it comes from no layer "
                    f"that scatters them, or through code that torch does not see; {REMEDY}"
                )
            return tokens
        return tokens if tokens is not None and input.dim() == 2 < tokens.dims else None

    def multiply(self, input: Tensor, bias: Tensor | None, tokens: Tokens | None = None) -> Tensor:
        """`forward` on plain tensors.

        Args:
            input: the input; one object for all layers that share it.
            bias: the layer's, or the caller's, or none.
            tokens: how the input's tokens lie; None where a scattered input has no padding, and otherwise where all are in their place.
        """
        mesh, split = self.mesh, self.split
        route = split.route(self._check_width(input))
        block = self.block()
        bias = bias if bias is None else bias.to(block.dtype)
        resharded = self.reshard_after_forward and mesh.size("z") > 1
        if mesh.size("model") == 1 and not resharded and type(self.operation) is Matmul:
            return F.linear(plain(input).to(self.compute_dtype(input)), block, bias)
        whole, source = self._entered(input, route, tokens)
        if split.gives == "whole":
            output = Product.apply(whole, block, None, route, self, source)
            output = gather_from(output, mesh, split.output)[..., : self.out_features]
            output = output if bias is None else output + bias
        else:
            output = Product.apply(whole, block, bias, route, self, source)
        if tokens is not None and input.dim() == 2 < tokens.dims:
            output = output.flatten(0, -2)
        return self._without_padding(output) if split.pad_vocabulary and split.gives != "whole" else output

    def _entered(self, input: Tensor, route: Route, tokens: Tokens | None) -> Entered:
        """The input as the product reads it, entered for this layer or for one before it that reads the same tensor."""
        split, missing = self.split, 0
        dtype = self.compute_dtype(input)
        if split.takes == "whole":
            missing = self.layouts["weight"].padded(self.mesh.grid)[1] - self.in_features

        def make() -> Entered:
            share = plain(input).to(dtype)
            share = share if tokens is None else tokens.unflatten(share)
            if split.takes == "whole":
                share = F.pad(share, (0, missing)) if missing else share
                share = split_to(share, self.mesh, split.contracted)
            return enter(share, route, self, tokens.whole if tokens is not None and route.takes == "tokens" else None)

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
        """True if the input's features are scattered over the output axis as well.

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
            f"{self}: the input has {input.shape[-1]} features, expected {wanted}: {share} of {self.in_features}; where a forward goes ways that the "
            "plan does not know, give example_inputs that take them, or leave the layers before it self_contained"
        )

    def extra_repr(self) -> str:
        """Features of the whole layer and its place on the grid."""
        kind = "transposed" if self.split.transposed else "normal"
        return f"{super().extra_repr()}, {kind}, takes={self.split.takes}, gives={self.split.gives}"
