"""Gradients averaged over the data-parallel ranks in chunks, each of which may be used before the last is there (000, 3.3.3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from plugins.pipeline.host_store import HostStore, align, ranges


@dataclass(frozen=True)
class Chunk:
    """The elements `begin` to `end` of a store, and the work that averages their gradients."""

    store: HostStore
    begin: int
    end: int
    work: Any = None

    def wait(self) -> None:
        """Wait until the gradients are averages; on a GPU the current stream does."""
        if self.work is not None:
            self.work.wait()


def chunks_of(stores: Iterable[HostStore], size: int) -> list[Chunk]:
    """Cut stores into chunks of `size` elements."""
    return [Chunk(store, *part) for store in stores for part in ranges(0, store.length, align(size))]


def averaged(chunks: Iterable[Chunk], group: dist.ProcessGroup) -> Iterator[Chunk]:
    """Chunks in their order, averaged over the ranks of a group; of each that comes the next one is under way.

    One at a time: two would share the network, and the first would be there no sooner than the second.
    """
    before: Chunk | None = None
    for chunk in chunks:
        part = _divided(chunk, group)
        if before is not None:
            before.wait()
        started = replace(chunk, work=dist.all_reduce(part, group=group, async_op=True))
        if before is not None:
            yield before
        before = started
    if before is not None:
        yield before


def _divided(chunk: Chunk, group: dist.ProcessGroup) -> Tensor:
    """A chunk's gradients, divided before they are summed: a sum of 16-bit ones may overflow where their mean does not."""
    store = chunk.store
    assert store.gradient is not None
    return store.gradient[store.packed(chunk.begin) : store.packed(chunk.end)].div_(dist.get_world_size(group))
