"""The last batch of an epoch where readers do not divide it.

Accelerate fills such a batch up with samples of the first, which one process does not read. The Trainer leaves them out here:
a reader computes on those of its rows that are of the last batch, and where it has none, on one row that counts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler

from axonn_plugins.hosts.transformers.accelerate_patch import same


class Part(dict):
    """The rows of a filled batch that are not filled in.

    Attributes:
        share: weight of a mean over these rows in the mean over all readers; that of all rows of the batch is then right.
    """

    share = 1.0


class Nothing(Part):
    """One row of a batch of which this reader has none."""

    share = 0.0

    def counted(self) -> dict[str, Any]:
        """The same without the row."""
        return {key: value[:0] if isinstance(value, torch.Tensor) else value for key, value in self.items()}


@dataclass(frozen=True)
class Last:
    """This reader's part of the last batch.

    Attributes:
        rows: in this reader's batch, filled in ones too.
        own: of them that are not filled in; the first.
        share: see `Part`.
    """

    rows: int
    own: int
    share: float

    def part_of(self, batch: Mapping[str, Any]) -> Part:
        """Its own rows."""
        kept = max(self.own, 1)
        made = Part if self.own else Nothing
        part = made({key: value[:kept] if self._has_rows(value) else value for key, value in batch.items()})
        part.share = self.share
        return part

    def filled(self, found: Any) -> Any:
        """Tensors with a row for each of its own rows, filled up again to be gathered."""
        if isinstance(found, torch.Tensor) and found.dim() and len(found) < self.rows:
            return torch.cat([found, found[-1:].expand(self.rows - len(found), *found.shape[1:])])
        if isinstance(found, tuple | list):
            return type(found)(self.filled(one) for one in found)
        return {key: self.filled(one) for key, one in found.items()} if isinstance(found, dict) else found

    def _has_rows(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == self.rows


def last(batch: Any) -> Last | None:
    """This reader's part, if `batch`, the one last read, is filled up; the same on all ranks.

    A batch that has not a row for each sample, as flattened ones have not, is left as it is.
    """
    from accelerate.data_loader import DataLoaderDispatcher
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils.operations import find_batch_size

    state, counted, each = GradientState(), AcceleratorState(), same()
    readers, reader = counted.num_processes // each, counted.process_index // each
    if readers == 1 or isinstance(batch, Part) or not isinstance(batch, Mapping) or not state.end_of_dataloader:
        return None
    if isinstance(state.active_dataloader, DataLoaderDispatcher):
        read = max(state.remainder, 0)
        rows = math.ceil(read / readers)
    else:
        rows, read = _filled_up(state.active_dataloader, readers)
    if not read or find_batch_size(batch) != rows or read == rows * readers:
        return None
    own = min(max(read - reader * rows, 0), rows)
    return Last(rows, own, own * readers / read)


def _filled_up(loader: Any, readers: int) -> tuple[int, int]:
    """Rows of a reader's batches, and how many samples the last batches of all have; 0 where they are full, or it is not known."""
    from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler

    shard = loader.batch_sampler
    while isinstance(shard, SkipBatchSampler):  # of a run that resumes; Accelerate no longer knows its size
        shard = shard.batch_sampler
    samples = getattr(shard, "batch_sampler", None)
    if not isinstance(shard, BatchSamplerShard) or not isinstance(samples, BatchSampler) or shard.drop_last:
        return 0, 0
    rows: int = samples.batch_size // (readers if shard.split_batches else 1)
    return rows, len(samples.sampler) % (rows * readers)  # type: ignore[arg-type]


_share = 1.0


@contextmanager
def counting(part: Any) -> Iterator[None]:
    """Inside, what is computed is of a part of a batch, if it is one."""
    global _share
    _share = part.share if isinstance(part, Part) else 1.0
    try:
        yield
    finally:
        _share = 1.0


def share() -> float:
    """Weight of a mean over the rows that are computed on; nothing that is gathered counts where it is 0."""
    return _share
