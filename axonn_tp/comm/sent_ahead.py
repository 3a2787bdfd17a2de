"""Weights that code changes, past what torch counts (``.data``), while they are gathered ahead of their layers: refused.

Their layers would compute with what was sent before. Looked at in fewer and fewer forwards.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class SentAhead:
    """Counts a model's forwards."""

    def __init__(self) -> None:
        self._forwards = 0

    def begin(self) -> None:
        """A forward begins."""
        self._forwards += 1

    @torch.no_grad()
    def look(self, shard: Tensor, gathered: Tensor, group: dist.ProcessGroup, name: str) -> None:
        """A layer is about to compute with what was gathered ahead.

        Args:
            shard: this rank's, in the type in which it was sent.
            gathered: from all ranks.
            group: these ranks; a stand-in for ranks that are not there, torch's "fake", has gathered nothing.
            name: of the layer.

        Raises:
            ValueError: the shard has other values by now.
        """
        if self._forwards & (self._forwards - 1) or dist.get_backend(group) == "fake":
            return
        if shard.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        sent = gathered.chunk(group.size())[group.rank()]
        if torch.equal(sent, shard) or torch.allclose(sent, shard, rtol=0, atol=0, equal_nan=True):
            return
        raise ValueError(
            f"the model's forward changes the weight of layer {name} by .data, which torch does not count, when it is on its way to the other ranks of z "
            "already; change it under torch.no_grad() without .data, or before the model is called"
        )
