"""The Trainer's loaders end with their samples: Accelerate's fill the last batch up with those of the first.

Samples are left out before a collator sees them, since what it makes of several need not have a row for each.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard, SkipBatchSampler
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.transformers.accelerate_patch import has_state


class Unfilled(BatchSamplerShard):
    """A reader's batches; the last one has what is left of the reader's samples, or one that counts nothing (see `last_batch`)."""

    def last(self) -> tuple[int, int]:
        """Samples of a full batch, and how many the last batches of all readers have; 0 where they are full, or it is not known."""
        samples = self.batch_sampler
        if self.drop_last or not isinstance(samples, BatchSampler):
            return 0, 0
        rows: int = samples.batch_size // (self.num_processes if self.split_batches else 1)
        return rows, len(samples.sampler) % (rows * self.num_processes)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Accelerate's loaders tell it to no sampler of batches behind this one and one that skips batches."""
        if hasattr(self.batch_sampler, "set_epoch"):
            self.batch_sampler.set_epoch(epoch)

    def own(self) -> int:
        """Samples of this reader in its last batch, where that is not full."""
        rows, read = self.last()
        return min(max(read - self.process_index * rows, 0), rows)

    def __iter__(self) -> Iterator[Any]:
        """This reader's batches, as Accelerate shards them."""
        _draw_alike(self.batch_sampler)
        ends = len(self) - 1 if self.last()[1] else None
        for number, batch in enumerate(super().__iter__()):
            yield batch[: max(self.own(), 1)] if number == ends else batch


def _draw_alike(batches: Any) -> None:
    """Let a sampler that draws by a generator of all, as grouping by length does, draw the same on all readers, which have drawn for other rows."""
    sampler = getattr(batches, "sampler", batches)
    if isinstance(sampler, SequentialSampler) or getattr(sampler, "generator", None) is not None:
        return
    device = AcceleratorState().device if has_state() else torch.device("cpu")
    states: list[Any] = [torch.get_rng_state(), random.getstate(), numpy.random.get_state()]
    dist.broadcast_object_list(states, 0, device=device)
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])


class Together(Unfilled):
    """A reader's batches; the last ones, where they are not full, are one that all readers read."""

    def __iter__(self) -> Iterator[Any]:
        """This reader's batches, as Accelerate shards them."""
        rows, read = self.last()
        if not read:
            yield from BatchSamplerShard.__iter__(self)
            return
        _draw_alike(self.batch_sampler)
        of_all: list[Any] = []
        for batch in self.batch_sampler:
            of_all += batch
            if len(of_all) == rows * self.num_processes:
                yield of_all[self.process_index * rows :][:rows]
                of_all = []
        yield of_all


class Stream(IterableDatasetShard):
    """A reader's samples of a stream that every reader reads; it ends as `Unfilled` does."""

    left = 0

    def last(self) -> tuple[int, int]:
        """See `Unfilled`; known once the stream has ended."""
        return self._rows(), self.left

    def _rows(self) -> int:
        rows: int = self.batch_size // (self.num_processes if self.split_batches else 1)
        return rows

    def __iter__(self) -> Iterator[Any]:
        """This reader's batches, as Accelerate shards them."""
        rows, self.left, batch = self._rows(), 0, []
        for sample in self.dataset:
            batch.append(sample)
            if len(batch) == rows * self.num_processes:
                yield from self._own(batch)
                batch = []
        if batch and not self.drop_last:
            self.left = len(batch)
            yield from self._own(batch) or batch[:1]

    def _own(self, batch: list[Any]) -> list[Any]:
        rows = self._rows()
        return batch[self.process_index * rows :][:rows]


class Divided(IterableDatasetShard):
    """A reader's samples of a stream that has as many for every reader."""

    def __iter__(self) -> Iterator[Any]:
        """This reader's batches, as Accelerate shards them.

        Raises:
            ConfigError: it ends with fewer; the same on all readers.
        """
        rows = self.batch_size // (self.num_processes if self.split_batches else 1)
        of_all, batch = rows * self.num_processes, []
        for sample in self.dataset:
            batch.append(sample)
            if len(batch) == of_all:
                yield from batch[self.process_index * rows :][:rows]
                batch = []
        if batch and not self.drop_last:
            raise ConfigError(
                f"a stream of prompts ends with {len(batch)} samples, where all readers together read {of_all} at a time; give a dataset that has a "
                "length, of which the last batch may be smaller, or a stream of a multiple"
            )


class _Whole(IterableDataset):
    """A stream of which Accelerate does not know that it could deal out its files: readers would not read equally often."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_stream"], name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stream)

    def __len__(self) -> int:
        return len(self._stream)


def keep_whole(loader: DataLoader) -> None:
    """Let every reader read a stream from end to end.

    Raises:
        ConfigError: by workers, which know how it ends and cannot say so.
    """
    if loader.num_workers:
        raise ConfigError(
            f"dispatch_batches = False and {loader.num_workers} workers of a DataLoader that reads a stream: readers do not learn from workers how "
            "many samples the last batch has; use dispatch_batches = True, or no workers"
        )
    object.__setattr__(loader, "dataset", _Whole(loader.dataset))  # a DataLoader takes no other later


def endless() -> bool:
    """True if the batch last read is of a `Stream` of unknown length, whose last batch Accelerate cannot tell from others."""
    stream = getattr(GradientState().active_dataloader, "dataset", None)
    if not isinstance(stream, Stream):
        return False
    try:
        len(stream)
    except TypeError:
        return True
    return False


def varying() -> bool:
    """True if the batch last read is of a sampler whose batches are of different sizes, as those that balance lengths are; the same on all ranks."""
    shard = unfilled(GradientState().active_dataloader)
    return shard is not None and shard.batch_size is None


class _Redrawn(RandomSampler):
    """An order that one process draws anew for each epoch, by torch's generator; all readers have the first's."""

    device: torch.device

    def __iter__(self) -> Iterator[int]:
        """This reader's batches, as Accelerate shards them."""
        seed = torch.empty((), dtype=torch.int64).random_().to(self.device)
        dist.broadcast(seed, 0)
        self.generator.manual_seed(int(seed))
        return super().__iter__()


def redraw(loader: DataLoader, device: torch.device) -> None:
    """Let a loader that shuffles by torch's generator do so on several readers, where Accelerate would draw once for all epochs."""
    sampler: Any = loader.sampler
    if type(loader.sampler) is RandomSampler and sampler.generator is None:
        sampler.__class__, sampler.generator, sampler.device = _Redrawn, torch.Generator(), device


def end_with_samples(loader: Any, together: bool = False) -> Any:
    """Let a loader of Accelerate end with its samples.

    Args:
        loader: what Accelerate made of one.
        together: every reader reads the last batch where it is not full; a stream has to end with full ones.
    """
    shard = _shard(loader)
    if type(shard) is BatchSamplerShard:
        shard.__class__, shard.even_batches = Together if together else Unfilled, True
    if type(stream := getattr(loader, "dataset", None)) is IterableDatasetShard:
        stream.__class__ = Divided if together else Stream
    return loader


def shared() -> bool:
    """True if the batch last read is one that every reader has read."""
    state = GradientState()
    shard = _shard(state.active_dataloader)
    return isinstance(shard, Together) and state.end_of_dataloader and shard.last()[1] > 0


def unfilled(loader: Any) -> Unfilled | Stream | None:
    """The sampler of a loader that ends with its samples, or its stream; None for other loaders."""
    if isinstance(stream := getattr(loader, "dataset", None), Stream):
        return stream
    shard = _shard(loader)
    while isinstance(shard, SkipBatchSampler):  # of a run that resumes
        shard = shard.batch_sampler
    return shard if isinstance(shard, Unfilled) and not isinstance(shard, Together) else None


def _shard(loader: Any) -> Any:
    sampler = getattr(loader, "sampler", None)
    return sampler if isinstance(sampler, BatchSampler) else getattr(loader, "batch_sampler", None)
