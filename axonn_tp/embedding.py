"""Embedding with its vocabulary split over x and its features over y, stored in z-shards like a linear's weight."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from axonn_tp.collectives import Collective, reduce_from
from axonn_tp.layout import Layout, become
from axonn_tp.mesh import Grid, Mesh
from axonn_tp.weight import SplitWeight


def embedding_layout(vocabulary: int, features: int) -> Layout:
    """Layout of a table (vocabulary, features): the same as that of an output head it may share its weight with."""
    return Layout((vocabulary, features), ((0, "x"), (1, "y")), over_z=True)


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


def embedding_collectives(tokens: int, vocabulary: int, features: int, grid: Grid) -> list[Collective]:
    """The collectives of one forward and backward pass on one rank; `tokens` are the ids looked up on this rank."""
    shard = embedding_layout(vocabulary, features).local_numel(grid)
    made = [
        Collective("all_gather", "z", grid.gz, shard),
        Collective("all_reduce", "x", grid.gx, tokens * features // grid.gy),
        Collective("reduce_scatter", "z", grid.gz, shard * grid.gz),
    ]
    return [collective for collective in made if collective.size > 1]


class Embedding(SplitWeight, nn.Embedding):  # type: ignore[override]
    """`nn.Embedding` over a mesh: ids (…) → (…, features/gy), the same on every rank of x."""

    @classmethod
    def convert(cls, module: nn.Embedding, mesh: Mesh) -> None:
        """Turn an `nn.Embedding` that holds its full table into this class, in place."""
        become(module, cls, nn.Embedding)
        assert isinstance(module, cls)
        module._distribute(mesh)

    def _distribute(self, mesh: Mesh) -> None:
        self._split(mesh, {"weight": embedding_layout(self.num_embeddings, self.embedding_dim)})

    def forward(self, input: Tensor) -> Tensor:
        """Look up the ids that lie in this rank's part of the vocabulary and sum over x."""
        block = self._block(self._shard())
        size = block.shape[0]
        first = size * self.mesh.rank("x")
        local = input - first
        elsewhere = (local < 0) | (local >= size)
        padding = None
        if self.padding_idx is not None and first <= self.padding_idx < first + size:
            padding = self.padding_idx - first
        rows = F.embedding(local.masked_fill(elsewhere, 0), block, padding)
        return reduce_from(rows.masked_fill(elsewhere[..., None], 0), self.mesh, "x")
