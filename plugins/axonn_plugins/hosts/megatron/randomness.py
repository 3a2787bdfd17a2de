"""Random numbers: ranks that hold the same values draw the same, others draw others.

Megatron's tracker has a state for what differs among tensor ranks: initial weights and attention dropout draw from it.
Two more are ours, for dropout where a share is held by several tensor ranks: heads split over x alone, and the stream.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor, nn

from axonn_plugins.hosts.megatron import process_groups
from axonn_plugins.hosts.megatron.sharing import place, stream_over

HEADS, STREAM = "axonn-heads", "axonn-stream"
# Beyond the seeds that Megatron makes of one seed and ranks.
_HEADS_SEED, _STREAM_SEED, _GRID_SEED = 1 << 20, 1 << 21, 1 << 22


def seeded(original: Callable[..., None]) -> Callable[..., None]:
    """Megatron's ``model_parallel_cuda_manual_seed`` with our states."""
    signature = inspect.signature(original)

    @wraps(original)
    def model_parallel_cuda_manual_seed(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        mesh, seed = process_groups.mesh(), signature.bind(*args, **kwargs).arguments["seed"]
        tracker = get_cuda_rng_tracker()
        tracker.add(HEADS, seed + _HEADS_SEED + mesh.rank("x"))
        tracker.add(STREAM, seed + _STREAM_SEED + place(mesh, stream_over(process_groups.settings(), mesh)))
        # Nothing draws from it: its name tells whose states a checkpoint has.
        settings = process_groups.settings()
        tracker.add(f"axonn-{settings.gx}-{settings.gy}-{settings.layout}", seed + _GRID_SEED)

    return model_parallel_cuda_manual_seed


@contextmanager
def stream_state(drops: bool) -> Iterator[None]:
    """Draw as the share of the stream that this rank holds does.

    Args:
        drops: whether anything is drawn.
    """
    if drops and stream_over(process_groups.settings(), process_groups.mesh()):
        with get_cuda_rng_tracker().fork(STREAM):
            yield
    else:
        yield


class StreamDropout(nn.Dropout):
    """Dropout of a share of the residual stream."""

    def forward(self, input: Tensor) -> Tensor:
        """Same shape."""
        with stream_state(self.training and self.p > 0):
            return super().forward(input)


class HeadsDropout(nn.Dropout):
    """Dropout of attention whose heads are split over x alone."""

    def forward(self, input: Tensor) -> Tensor:
        """Same shape."""
        if not (self.training and self.p > 0):
            return input
        with get_cuda_rng_tracker().fork(HEADS):
            return super().forward(input)


def bias_dropout_add_in_stream(layer: Any) -> None:
    """Have a transformer layer add its bias, dropout and residual under the stream's random numbers."""

    @contextmanager
    def handler() -> Iterator[None]:
        with torch.enable_grad(), stream_state(layer.training and layer.hidden_dropout > 0):
            yield

    layer.bias_dropout_add_exec_handler = handler
