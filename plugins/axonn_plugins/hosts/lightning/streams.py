"""Data without indices (`torch.utils.data.IterableDataset`), dealt out to readers by the batch.

Lightning gives such data no sampler: every reader reads it from end to end. Where readers find the same first batch, nobody has divided the
data, and they take its batches in turns, so that readers together take the samples of one process. Where they find different ones, the
data is divided already, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from axonn_plugins.hosts.common import digests
from axonn_tp import Mesh


def dealt(loader: Any, mesh: Callable[[], Mesh | None], readers: int, predicting: bool = False) -> Any:
    """A loader whose batches readers take in turns; any other than a DataLoader of an IterableDataset is returned.

    Args:
        loader: the script's, which is not changed.
        mesh: the run's, asked for when the loader is first read.
        readers: how many there are.
        predicting: ranks of z read the same, and no batch is read twice.
    """
    if readers == 1 or not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset):
        return loader
    kind: Any = type(loader)
    found: Any = copy(loader)
    if not isinstance(loader, _Dealt):
        found.__class__ = type(kind.__name__, (_Dealt, kind), {})
    found.axonn_mesh, found.axonn_predicting = mesh, predicting
    found.axonn_turns, found.axonn_begun = None, None
    return found


def decide(loader: Any) -> None:
    """Have a loader that can tell its length know now whether it is dealt out; every rank calls it."""
    if isinstance(loader, _Dealt) and hasattr(type(loader.dataset), "__len__"):
        loader.axonn_begin()


class _Dealt(DataLoader):
    """Yields this reader's batches.

    Attributes:
        axonn_turns: how many readers take turns, and which of them this is; None until the first batch is there.
        axonn_begun: an iterator of which the first batches have been read, with these.
    """

    axonn_mesh: Callable[[], Mesh | None]
    axonn_predicting: bool
    axonn_turns: tuple[int, int] | None
    axonn_begun: tuple[Iterator[Any], list[Any]] | None

    def __len__(self) -> int:
        batches = super().__len__()
        if self.axonn_turns is None:
            mesh = self.axonn_mesh()
            readers, reader = _place(mesh, self.axonn_predicting) if mesh is not None else (1, 0)
        else:
            readers, reader = self.axonn_turns
        if self.axonn_predicting:
            return len(range(reader, batches, readers))
        return batches // readers if self.drop_last else -(-batches // readers)

    def axonn_begin(self) -> None:
        """Read the first batch, and find whether all readers have the same."""
        if self.axonn_begun is None:
            batches = super().__iter__()
            self.axonn_begun = batches, list(islice(batches, 1))
        if self.axonn_turns is None:
            mesh = self.axonn_mesh()
            same = mesh is not None and _same(self.axonn_begun[1], mesh, self.axonn_predicting)
            self.axonn_turns = _place(mesh, self.axonn_predicting) if mesh is not None and same else (1, 0)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.axonn_begin()
        assert self.axonn_begun is not None and self.axonn_turns is not None
        (batches, first), self.axonn_begun = self.axonn_begun, None
        readers, reader = self.axonn_turns
        turn: list[Any] = []
        for batch in chain(first, batches):
            turn.append(batch)
            if len(turn) == readers:
                yield turn[reader]
                turn = []
        if turn and self.axonn_predicting:
            yield from turn[reader : reader + 1]
        elif turn and not self.drop_last:
            yield turn[reader % len(turn)]


def _axis(predicting: bool) -> str:
    return "data" if predicting else "batch"


def _place(mesh: Mesh, predicting: bool) -> tuple[int, int]:
    return mesh.size(_axis(predicting)), mesh.rank(_axis(predicting))


def _same(batches: list[Any], mesh: Mesh, predicting: bool) -> bool:
    """True if all readers have the same first batch, and there are tensors in it that tell."""
    found = [value for _, value in digests.leaves("", batches) if isinstance(value, Tensor)]
    card = torch.tensor([len(found), 0], dtype=torch.int64, device=mesh.device)
    for value in found:
        kind = digests.of_text(digests.kind(value))
        card[1] = card[1] * 31 + digests.digest(value).to(mesh.device) * 17 + kind
    axis = _axis(predicting)
    cards = [torch.empty_like(card) for _ in range(mesh.size(axis))]
    if len(cards) > 1:
        dist.all_gather(cards, card, group=mesh.group(axis))
    return bool(found) and all(bool((card == one).all()) for one in cards)
