"""Several small tensors in one collective over an axis: one call's latency in the place of many.

`fits` is the plan: tensors that follow each other share a call until it is full. `start_all_gathers` and `start_sums_of_shares`
give each tensor what a call of its own would (`axonn_tp.comm.collectives`), and send the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from axonn_tp.comm.collectives import Pending, start_all_gather, start_sum_of_shares
from axonn_tp.grid.mesh import Axes


def fits(held: int, size: int, most: int) -> bool:
    """True if a tensor may join those before it in a call; one that is too large for any goes alone.

    Args:
        held: bytes of those before it.
        size: its bytes.
        most: bytes of a call.
    """
    return not held or held + size <= most


class Bundle:
    """A collective under way that several tensors share; each result is taken once.

    Args:
        pending: the collective.
        split: the results, of what it gives.
    """

    def __init__(self, pending: Pending, split: Callable[[Tensor], Sequence[Tensor]]) -> None:
        self._pending: Pending | None = pending
        self._split = split
        self._results: dict[int, Tensor] = {}

    @property
    def whole(self) -> bool:
        """See `Pending`."""
        return self._pending is not None and self._pending.whole

    def wait(self) -> None:
        """Until the results are there."""
        if self._pending is not None:
            self._results = dict(enumerate(self._split(self._pending.wait())))
            self._pending = None

    def take(self, number: int) -> Tensor:
        """One tensor's result."""
        self.wait()
        return self._results.pop(number)


def start_all_gathers(tensors: Sequence[Tensor], mesh: Axes, axis: str) -> Bundle:
    """Begin to join the axis' tensors along dim 0, tensor by tensor; all of one type, over an axis of more than one rank."""
    if len(tensors) == 1:
        return Bundle(start_all_gather(tensors[0], mesh, axis), _alone)
    ranks, shapes = mesh.size(axis), [tensor.shape for tensor in tensors]

    def split(gathered: Tensor) -> list[Tensor]:
        columns = gathered.view(ranks, -1).split([shape.numel() for shape in shapes], 1)
        return [part.reshape(ranks * shape[0], *shape[1:]) for part, shape in zip(columns, shapes, strict=True)]

    return Bundle(start_all_gather(torch.cat([tensor.flatten() for tensor in tensors]), mesh, axis), split)


def start_sums_of_shares(tensors: Sequence[Tensor], mesh: Axes, axis: str) -> Bundle:
    """Begin the sums over an axis of which this rank gets its share of dim 0, which the axis' ranks divide."""
    if len(tensors) == 1:
        return Bundle(start_sum_of_shares(tensors[0], mesh, axis), _alone)
    ranks = mesh.size(axis)
    shapes = [(tensor.shape[0] // ranks, *tensor.shape[1:]) for tensor in tensors]
    columns = [tensor.reshape(ranks, -1) for tensor in tensors]

    def split(shares: Tensor) -> list[Tensor]:
        parts = shares.split([column.shape[1] for column in columns])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    return Bundle(start_sum_of_shares(torch.cat(columns, 1).flatten(), mesh, axis), split)


def _alone(result: Tensor) -> list[Tensor]:
    return [result]
