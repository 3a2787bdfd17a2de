"""Megatron's embeddings on the grid: words split over x by vocabulary and over y by features, positions over y."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_plugins.hosts.megatron import process_groups
from axonn_plugins.hosts.megatron.gathers import OwnShards
from axonn_plugins.hosts.megatron.parameters import mark, new_weight
from axonn_plugins.hosts.megatron.sharing import check_length, stream_over
from axonn_tp.comm.collectives import split_to
from axonn_tp.grid.layout import Layout, become
from axonn_tp.grid.mesh import Mesh
from axonn_tp.layers.embedding import Embedding, check_embedding, embedding_layout
from axonn_tp.layers.weight import Split


class VocabParallelEmbedding(OwnShards, Embedding):  # type: ignore[misc]
    """Megatron's ``VocabParallelEmbedding``: ids (batch, sequence) → this rank's share (batch, sequence, features).

    Args:
        num_embeddings: words, a multiple of gx·gy.
        embedding_dim: features.
        init_method: fills a table in place.
        config: Megatron's.
        others: Megatron's further arguments: groups, which are the mesh's, and whether tokens are scattered, which the layout says.

    Raises:
        ValueError: gy does not divide the features, or gx·gy the words.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: Callable[[Tensor], Any],
        config: Any,
        **others: Any,
    ) -> None:
        nn.Module.__init__(self)
        mesh = process_groups.mesh()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = None, None, 2.0
        self.scale_grad_by_freq = self.sparse = False
        check_embedding(self, mesh.grid, "word_embeddings")
        if num_embeddings % mesh.size("model"):
            raise ValueError(
                f"layer word_embeddings: {num_embeddings} words do not divide by gx*gy = {mesh.grid.gx}*{mesh.grid.gy}; "
                "pad the vocabulary to a multiple of it"
            )
        layout = embedding_layout((num_embeddings, embedding_dim))
        self._prepare(mesh, {"weight": layout})
        self.scatter_tokens = "x" in stream_over(process_groups.settings(), mesh)
        self.deterministic = config.deterministic_mode
        self._parameters["weight"] = new_weight(layout, mesh, config, init_method, 0)

    def forward(self, input: Tensor) -> Tensor:
        """Rows of this rank's tokens."""
        if self.scatter_tokens:
            check_length(input.shape[-1], self.mesh)
        return self.looked_up(input)

    def _rows(self, input: Tensor, table: Tensor, padding: int | None) -> Tensor:
        """As Megatron's: the gradient of a look-up is not the same each time on a GPU, that of indices is where torch is told so."""
        return table[input] if self.deterministic else super()._rows(input, table, padding)


class PositionEmbedding(Split, nn.Embedding):
    """Learned positions: position ids (batch, sequence) → this rank's share of features, and of the sequence."""

    hands_out_shards = True
    scatter_tokens: bool

    @classmethod
    def convert(cls, module: nn.Embedding, mesh: Mesh, scatter_tokens: bool) -> None:
        """Turn an `nn.Embedding` that holds its full table into this class, in place."""
        become(module, cls, nn.Embedding)
        assert isinstance(module, cls)
        module.scatter_tokens = scatter_tokens
        shape = (module.num_embeddings, module.embedding_dim)
        layout = Layout(shape, ((1, "y"),), partial=("x",) if scatter_tokens else ())
        module._split(mesh, {"weight": layout})
        (table,) = module.parameters()
        mark(table, layout, mesh)

    def forward(self, input: Tensor) -> Tensor:
        """Rows of this rank's tokens."""
        if self.scatter_tokens:
            with torch.no_grad():
                input = split_to(input, self.mesh, "x", dim=-1)
        return F.embedding(input, self.weight)
