"""The Trainer's loaders end with their samples: Accelerate's fill the last batch up with those of the first.

Samples are left out before a collator sees them, since what it makes of several need not have a row for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from torch.utils.data import BatchSampler


class Unfilled(BatchSamplerShard):
    """A reader's batches; the last one has what is left of the reader's samples, or one that counts nothing (see `last_batch`)."""

    def last(self) -> tuple[int, int]:
        """Samples of a full batch, and how many the last batches of all readers have; 0 where they are full, or it is not known."""
        samples = self.batch_sampler
        if self.drop_last or not isinstance(samples, BatchSampler):
            return 0, 0
        rows: int = samples.batch_size // (self.num_processes if self.split_batches else 1)
        return rows, len(samples.sampler) % (rows * self.num_processes)  # type: ignore[arg-type]

    def own(self) -> int:
        """Those of this reader in its last batch, where that is not full."""
        rows, read = self.last()
        return min(max(read - self.process_index * rows, 0), rows)

    def __iter__(self) -> Iterator[Any]:
        """Theirs."""
        ends = len(self) - 1 if self.last()[1] else None
        for number, batch in enumerate(super().__iter__()):
            yield batch[: max(self.own(), 1)] if number == ends else batch


def end_with_samples(loader: Any) -> Any:
    """Let a loader of Accelerate end with its samples."""
    shard = _shard(loader)
    if type(shard) is BatchSamplerShard:
        shard.__class__, shard.even_batches = Unfilled, True
    return loader


def unfilled(loader: Any) -> Unfilled | None:
    """How a loader's batches are made, if it ends with its samples."""
    shard = _shard(loader)
    while isinstance(shard, SkipBatchSampler):  # of a run that resumes
        shard = shard.batch_sampler
    return shard if isinstance(shard, Unfilled) else None


def _shard(loader: Any) -> Any:
    sampler = getattr(loader, "sampler", None)
    return sampler if isinstance(sampler, BatchSampler) else getattr(loader, "batch_sampler", None)
