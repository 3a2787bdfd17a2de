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
from axonn_plugins.hosts.megatron.sharing import share_of_stream, whole_stream
from axonn_tp.comm.collectives import gather_from, split_to


def install(originals: Originals) -> None:
    """Have layers that are made from now on lie on the grid."""
    originals.wrap(multi_token_prediction.MultiTokenPredictionLayer, "__init__", _on_grid)
    originals.replace(multi_token_prediction.MultiTokenPredictionLayer, "_concat_embeddings", _concat_embeddings)
    originals.wrap(multi_token_prediction.MultiTokenPredictionBlock, "forward", _gives_whole)


def streams_of_loss(config: Any) -> int:
    """Streams, one behind the other, that the pipeline stage of the loss is given: several where predictions are another stage's."""
    return 1 + config.mtp_num_layers if getattr(config, "mtp_standalone", False) else 1


def of_each(change: Callable[..., Tensor], streams: Tensor, count: int) -> Tensor:
    """So many streams, each changed by `whole_stream` or its inverse."""
    settings, mesh = process_groups.settings(), process_groups.mesh()
    if count == 1:
        return change(streams, settings, mesh)
    return torch.cat([change(one, settings, mesh) for one in streams.chunk(count)])


def _gives_whole(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """To the stage of the loss, where that is another."""

    @wraps(original)
    def forward(self: Any, *args: Any, **named: Any) -> Tensor:
        streams = original(self, *args, **named)
        alone = getattr(self, "axonn_alone", False)
        return of_each(whole_stream, streams, streams_of_loss(self.config)) if alone else streams

    return forward


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
