"""Multi-token prediction on a grid: its layers lie as others do, and two streams become one where every rank of y has whole tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from megatron.core.transformer import multi_token_prediction
from torch import Tensor

from axonn_plugins.hosts.megatron import process_groups
from axonn_plugins.hosts.megatron.norms import split_norms
from axonn_plugins.hosts.megatron.originals import Originals
from axonn_plugins.hosts.megatron.sharing import share_of_stream
from axonn_tp.comm.collectives import gather_from, split_to


def install(originals: Originals) -> None:
    """Have layers that are made from now on lie on the grid."""
    originals.wrap(multi_token_prediction.MultiTokenPredictionLayer, "__init__", _on_grid)
    originals.replace(multi_token_prediction.MultiTokenPredictionLayer, "_concat_embeddings", _concat_embeddings)


def _on_grid(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def init(self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        split_norms(self, ("enorm", "hnorm", "final_layernorm"))
        self.eh_proj.gather_output = True

    return init


def _concat_embeddings(self: Any, hidden_states: Tensor, decoder_input: Tensor) -> Tensor:
    """As Megatron's, on shares of both streams; the features of their concatenation are split over y anew."""
    settings, mesh = process_groups.settings(), process_groups.mesh()
    streams = (self.enorm(decoder_input), self.hnorm(hidden_states))
    both = torch.cat([gather_from(stream, mesh, "y") for stream in streams], -1)
    projected, _ = self.eh_proj(split_to(both, mesh, "y"))
    return share_of_stream(projected, settings, mesh)
