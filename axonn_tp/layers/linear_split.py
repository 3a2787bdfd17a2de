"""A linear layer on the grid: shares of its weight, layouts of its input and output, and its collectives."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from axonn_tp.comm.collectives import Collective
from axonn_tp.grid.layout import Layout
from axonn_tp.grid.mesh import Grid
from axonn_tp.layers.features import Features
from axonn_tp.layers.product import Route
from axonn_tp.options import Options


@dataclass(frozen=True)
class LinearSplit:
    """The use that a linear layer makes of the grid's axes.

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

    def features(self, n: int, dim: int = -1) -> Features:
        """The place of n output features along a dim."""
        over = self.split_over if self.gives != "tokens" else (self.output,)
        return Features(dim, over, n, self.parts)

    def route(self, scattered_input: bool) -> Route:
        """The way of the product's input and output between ranks.

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
        """True if n output features, and the heads, divide by both axes."""
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
    """True if the module is the linear of HF's GPT-2 family, which keeps its weight as (in, out)."""
    kinds = ((kind.__module__, kind.__name__) for kind in type(module).__mro__)
    return ("transformers.pytorch_utils", "Conv1D") in kinds


def features(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a module that computes as `nn.Linear` does, else None."""
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return module.in_features, module.out_features
    return (int(module.nx), int(module.nf)) if is_conv1d(module) else None  # type: ignore[arg-type]
