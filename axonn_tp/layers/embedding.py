"""Embedding with its vocabulary split over x and its features over y, stored in z-shards like a linear's weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_tp.comm.collectives import Collective, reduce_from, scatter_from
from axonn_tp.grid.layout import Layout, become
from axonn_tp.grid.mesh import Grid, Mesh
from axonn_tp.layers.activation import split_among
from axonn_tp.layers.features import Features
from axonn_tp.layers.product import filled
from axonn_tp.layers.tokens import Tokens
from axonn_tp.layers.weight import SplitWeight


def embedding_layout(shape: tuple[int, ...], tied: bool = False) -> Layout:
    """Layout of a table of shape (vocabulary, features); `tied`: padded as the output head is that shares its weight."""
    return Layout(shape, ((0, "x"), (1, "y")), over_z=True, even=((0, "y"),) if tied else ())


def check_embedding(module: nn.Embedding, grid: Grid, name: str) -> None:
    """Refuse what cannot be split exactly.

    Raises:
        ValueError: names the layer and the reason.
    """
    if module.embedding_dim % grid.gy:
        raise ValueError(
            f"layer {name}: {module.embedding_dim} features do not divide by gy = {grid.gy}, the axis that splits them; "
            f"choose gy from the divisors of {module.embedding_dim}"
        )
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise ValueError(
                f"layer {name}: {option} cannot be split over x; leave it out or name the layer replicated in the plan"
            )


def embedding_collectives(tokens: int, layout: Layout, grid: Grid, scatter_tokens: bool = False) -> list[Collective]:
    """The collectives of one forward and backward pass on one rank; `tokens` are the ids looked up in one x-y plane."""
    shard = layout.local_numel(grid)
    rows = tokens * layout.shape[1] // grid.gy
    made = [
        Collective("all_gather", "z", grid.gz, shard),
        Collective("reduce_scatter" if scatter_tokens else "all_reduce", "x", grid.gx, rows),
        *([Collective("all_gather", "x", grid.gx, rows // grid.gx)] if scatter_tokens else []),
        Collective("reduce_scatter", "z", grid.gz, shard * grid.gz),
    ]
    return [collective for collective in made if collective.size > 1]


def refuse_unknown(ids: Tensor, rows: int) -> None:
    """Refuse ids that the serial table has no row of: on a share they would be another rank's, and on none, or padding.

    Raises:
        RuntimeError: there is one.
    """
    known = ((ids >= 0) & (ids < rows)).all()
    torch._assert_async(known, f"an id is not one of the embedding's {rows} rows; correct it, or make the table larger")


class Embedding(SplitWeight, nn.Embedding):  # type: ignore[override]
    """`nn.Embedding` over a mesh: ids (…, tokens) → (…, tokens, features/gy), the same on every rank of x.

    With `scatter_tokens` the output's tokens, dim −2, are scattered over x.
    """

    scatter_tokens: bool

    @classmethod
    def convert(cls, module: nn.Embedding, mesh: Mesh, scatter_tokens: bool = False, tied: bool = False) -> None:
        """Turn an `nn.Embedding` that holds its full table into this class, in place."""
        become(module, cls, nn.Embedding)
        assert isinstance(module, cls)
        module._split(mesh, {"weight": embedding_layout((module.num_embeddings, module.embedding_dim), tied)})
        module.scatter_tokens = scatter_tokens

    def compute_dtype(self, shard: Tensor) -> torch.dtype:
        """The table's own: autocast leaves look-ups alone."""
        return shard.dtype

    def forward(self, input: Tensor) -> Tensor:
        """Look up the ids that lie in this rank's part of the vocabulary and sum over x."""
        features = Features(-1, ("y",), self.embedding_dim)
        if not self.scatter_tokens or self.mesh.size("x") == 1:
            return split_among(self.looked_up(input), self.mesh, ("y",), features=features)
        tokens = Tokens(input.shape[-1], self.mesh.size("x"), input.dim() + 1)
        return split_among(self.looked_up(input), self.mesh, ("x", "y"), tokens, features=features)

    def looked_up(self, input: Tensor) -> Tensor:
        """The rows that were looked up, as a plain tensor."""
        if self.scatter_tokens:
            rows = self._look_up(filled(input, -1, self.mesh.size("x")))
            return scatter_from(rows, self.mesh, "x", dim=-2)
        return reduce_from(self._look_up(input), self.mesh, "x")

    def _look_up(self, input: Tensor) -> Tensor:
        """Rows of this rank's part of the vocabulary, zeros for other ids."""
        block = self.block()
        size, ranks = block.shape[0], self.mesh.size("x")
        if size * ranks != self.num_embeddings or ranks > 1:
            refuse_unknown(input, self.num_embeddings)
        if ranks == 1:
            return self._rows(input, block, self.padding_idx)
        first = size * self.mesh.rank("x")
        local = input - first
        elsewhere = (local < 0) | (local >= size)
        padding = None
        if self.padding_idx is not None and first <= self.padding_idx < first + size:
            padding = self.padding_idx - first
        rows = self._rows(local.masked_fill(elsewhere, 0), block, padding)
        return rows.masked_fill(elsewhere[..., None], 0)

    def _rows(self, input: Tensor, table: Tensor, padding: int | None) -> Tensor:
        """The table's rows of ids that are all in it; the one of `padding` has no gradient."""
        return F.embedding(input, table, padding)
