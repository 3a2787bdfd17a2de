"""The last batch of an epoch where readers do not divide it.

Accelerate fills such a batch up with samples of the first, which one process does not read. The Trainer leaves them out here:
a reader computes on those of its samples that are of the last batch, and where it has none, on one that counts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

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
        rows: of a full batch.
        own: samples of this reader, the first of its batch.
        share: see `Part`.
        cut: whether the batch has no others, but for one where the reader has none.
    """

    rows: int
    own: int
    share: float
    cut: bool = False

    @property
    def kept(self) -> int:
        """Samples that are computed on."""
        return max(self.own, 1)

    def part_of(self, batch: Mapping[str, Any]) -> Part:
        """The rows of a batch that are the reader's own."""
        made = Part if self.own else Nothing
        part = made({key: value[: self.kept] if self._is_filled(value) else value for key, value in batch.items()})
        part.share = self.share
        return part

    def filled(self, found: Any) -> Any:
        """Tensors with a row for each of its own samples, filled up to be gathered."""
        if isinstance(found, torch.Tensor) and found.dim() and len(found) < self.rows:
            return torch.cat([found, found[-1:].expand(self.rows - len(found), *found.shape[1:])])
        if isinstance(found, tuple | list):
            return type(found)(self.filled(one) for one in found)
        return {key: self.filled(one) for key, one in found.items()} if isinstance(found, Mapping) else found

    def _is_filled(self, value: Any) -> bool:
        return not self.cut and isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == self.rows


def last(batch: Any) -> Last | None:
    """This reader's part, if `batch`, the one last read, is not full; the same on all ranks."""
    from accelerate.data_loader import DataLoaderDispatcher
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils.operations import find_batch_size

    from axonn_plugins.hosts.transformers.unfilled import unfilled

    state, counted, each = GradientState(), AcceleratorState(), same()
    readers, reader = counted.num_processes // each, counted.process_index // each
    if readers == 1 or isinstance(batch, Part) or not isinstance(batch, Mapping) or not state.end_of_dataloader:
        return None
    shard = unfilled(state.active_dataloader)
    if isinstance(state.active_dataloader, DataLoaderDispatcher):
        read = max(state.remainder, 0)
        rows = math.ceil(read / readers)
        read = read if find_batch_size(batch) == rows else 0
    else:
        rows, read = (0, 0) if shard is None else shard.last()
        if read:
            state.active_dataloader.remainder = read
    own = min(max(read - reader * rows, 0), rows)
    return Last(rows, own, own * readers / read, cut=shard is not None) if read else None


def weighed_by_rows(batches: list[Any], accelerator: Any) -> list[Any]:
    """Batches of which each reader has another number of rows, as parts of those of all readers; all readers call it."""
    from accelerate.utils.operations import find_batch_size

    rows = torch.tensor([[find_batch_size(batch) or 1 for batch in batches]], device=accelerator.device)
    shares = (rows * accelerator.num_processes / accelerator.gather(rows).sum(0)).flatten().tolist()
    made = [Part(batch) if isinstance(batch, Mapping) else batch for batch in batches]
    for part, share in zip(made, shares, strict=True):
        if isinstance(part, Part):
            part.share = share
    return made


_part: Part | None = None


@contextmanager
def counting(part: Any) -> Iterator[None]:
    """Inside, what is computed is of a part of a batch, if it is one."""
    global _part
    _part = part if isinstance(part, Part) else None
    try:
        yield
    finally:
        _part = None


def share() -> float:
    """Weight of a mean over the rows that are computed on; nothing that is gathered counts where it is 0."""
    return 1.0 if _part is None else _part.share


def divides() -> bool:
    """True if readers divide the batch that is computed on, so that all have as many rows; the same on all ranks."""
    return _part is None
