"""Gradients averaged over the data-parallel ranks in chunks, each of which may be used before the last is there (000, 3.3.3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from axonn_plugins.pipeline.host_store import HostStore, align, ranges

_AHEAD = 1


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


def chunks_of(stores: Iterable[HostStore], size: int, least: int | None = None) -> list[Chunk]:
    """Cut stores into chunks of `size` elements, and the last one into halves down to `least`: nothing hides its update."""
    chunks = [Chunk(store, *part) for store in stores for part in ranges(0, store.length, align(size))]
    while least is not None and chunks and (length := chunks[-1].end - chunks[-1].begin) > align(least):
        last = chunks.pop()
        middle = last.begin + align(length // 2)
        chunks += [replace(last, end=middle), replace(last, begin=middle)]
    return chunks


def averaged(chunks: Iterable[Chunk], group: dist.ProcessGroup) -> Iterator[Chunk]:
    """Chunks in their order, averaged over the ranks of a group; of each that comes the next ones are under way.

    Two at a time: a chunk goes back and forth, and sums are computed, while the network has the other's bytes.
    """
    started: deque[Chunk] = deque()
    for chunk in chunks:
        started.append(replace(chunk, work=dist.all_reduce(_divided(chunk, group), group=group, async_op=True)))
        if len(started) > _AHEAD:
            yield started.popleft()
    yield from started


def _divided(chunk: Chunk, group: dist.ProcessGroup) -> Tensor:
    """A chunk's gradients, divided before they are summed: a sum of 16-bit ones may overflow where their mean does not."""
    store = chunk.store
    assert store.gradient is not None
    return store.gradient[store.packed(chunk.begin) : store.packed(chunk.end)].div_(dist.get_world_size(group))
