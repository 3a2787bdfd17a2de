"""Gradients as flat vectors, and their norms, part by part."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_plugins.optim.lending import flat
from axonn_plugins.optim.store import Entry, Store


def flat_gradient(parameter: nn.Parameter) -> Tensor:
    """A parameter's gradient in the parameter's order of memory.

    Raises:
        ValueError: it is sparse.
    """
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout != torch.strided:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} has a {gradient.layout} gradient; make its layer give dense ones, such as "
            "Embedding(sparse=False)"
        )
    same = gradient.stride() == parameter.stride()
    return flat(gradient if same else torch.empty_like(parameter).copy_(gradient))


def norm_in_parts(gradient: Tensor, size: int) -> Tensor:
    """The 2-norm of a flat gradient in float32 at least, of which at most `size` elements are upcast at a time."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    norms = [torch.linalg.vector_norm(part, dtype=dtype) for part in gradient.split(size)]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def check_norm(most: float | None) -> None:
    """Refuse what no gradient can be clipped to.

    Raises:
        ValueError: it is below 0, or no number.
    """
    if most is not None and (isinstance(most, str) or not most >= 0):
        raise ValueError(
            f"max_norm = {most!r} is not a norm of gradients; use a number above 0, or None to clip nothing"
        )


def clip_factor(norm: Tensor, most: float) -> Tensor:
    """The factor of gradients of this norm after which it is at most `most`; 1 where that is infinite, whatever the norm."""
    return torch.ones_like(norm) if math.isinf(most) else (most / (norm + 1e-6)).clamp(max=1.0)


def squares_of(stores: list[Store], size: int) -> dict[str, Tensor]:
    """Squares of the 2-norms of gradients that have arrived, by the parameters' names, the same on all ranks that share them.

    Args:
        stores: all of them, reduced.
        size: elements upcast at a time.
    """
    squares: dict[str, Tensor] = {}
    for store in stores:
        for segment in store.segments:
            if segment.entry.arrived:
                part = store.gradient[segment.gradient : segment.gradient + segment.length]
                square = norm_in_parts(part, size).square()
                squares[segment.entry.name] = squares.get(segment.entry.name, 0) + square
    shared: dict[dist.ProcessGroup | None, list[Entry]] = {}
    for store in stores:
        for bucket in store.buckets:
            if bucket.sharded:
                shared.setdefault(bucket.process_group, []).extend(bucket.entries)
    sums: list[tuple[list[Entry], Tensor, Any]] = []
    for group, entries in shared.items():
        device = entries[0].parameter.device
        found = [squares.get(entry.name, torch.zeros(())).to(device, torch.float64) for entry in entries]
        summed = torch.stack(found)
        sums.append((entries, summed, dist.all_reduce(summed, group=group, async_op=True)))
    for entries, summed, handle in sums:
        handle.wait()
        squares.update((entry.name, square) for entry, square in zip(entries, summed.unbind(), strict=True))
    return squares
