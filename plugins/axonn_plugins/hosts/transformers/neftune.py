"""NEFTune's noise of one process: its size goes by the length to which all readers' rows are padded, and each reader takes its rows' part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_plugins.hosts.transformers.accelerate_patch import same
from axonn_plugins.hosts.transformers.last_batch import share
from axonn_tp.context.sums import current
from axonn_tp.layers.activation import split_of

_flat: bool | None = None


@contextmanager
def noisy(inputs: Any) -> Iterator[None]:
    """Inside, all readers call the model for a step, each on its inputs: on rows, or on one row in which samples follow each other."""
    global _flat
    _flat = isinstance(inputs, Mapping) and "position_ids" in inputs
    try:
        yield
    finally:
        _flat = None


def patch(module: Any) -> None:
    """Add to ``transformers.integrations.neftune``."""
    module.neftune_post_forward_hook = _of_all(module.neftune_post_forward_hook)


def _of_all(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def neftune_post_forward_hook(module: Any, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """The hook of transformers; the same random numbers on all readers, whose random states are alike, make what one process draws."""
        if _flat is None or not module.training or dist.get_world_size() == 1:
            return original(module, given, output)
        rows, columns = given[0].shape
        call: Any = current()  # the tokens are a share of those of whole rows, and so is their noise
        columns = columns if call is None else call.tokens
        sizes = torch.tensor([rows if share() else 0, columns], device=output.device)
        found = [torch.empty_like(sizes) for _ in range(dist.get_world_size())]
        dist.all_gather(found, sizes)
        every, reader = torch.stack(found)[:: same()].tolist(), dist.get_rank() // same()
        flat = _flat and all(size[0] <= 1 for size in every)
        of_rows, of_columns = [[size[at] * bool(size[0]) for size in every] for at in (0, 1)]
        shape = (1, sum(of_columns)) if flat else (sum(of_rows), max(of_columns))
        largest = module.neftune_noise_alpha / (shape[1] * module.embedding_dim) ** 0.5
        split, features = split_of(output), output.size(-1)
        if split is not None and split.tokens is not None:  # each share draws its own
            return output + torch.zeros_like(output).uniform_(-largest, largest)
        noise = torch.empty(*shape, module.embedding_dim, dtype=output.dtype, device=output.device)
        noise.uniform_(-largest, largest)
        if not share():
            return output
        before = sum((of_columns if flat else of_rows)[:reader])
        own = (noise[:, before:] if flat else noise[before:])[:rows, :columns]
        own = own if call is None else own.index_select(1, call.places.to(own.device))
        return output + own.narrow(-1, 0 if split is None else features * split.coordinates["y"], features)

    return neftune_post_forward_hook
