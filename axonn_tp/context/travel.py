"""Transport of keys and values, and by heads of queries and outputs, to where they are needed, and of gradients back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from axonn_tp.comm.collectives import Pending, start_all_to_all
from axonn_tp.context.chunks import Heads, Sight, needed, read_by
from axonn_tp.context.shared import AXIS, Shared


class Exchange:
    """Chunks to all their readers at once, and gradients back to their owners.

    Args:
        shared: the sequence.
        sight: what queries see.
        like: a chunk.

    Attributes:
        wanted: chunks of others that this rank reads.
    """

    def __init__(self, shared: Shared, sight: Sight, like: Tensor) -> None:
        self._shared, self._like = shared, like
        chunks, rank = shared.chunks, shared.rank
        self.wanted = needed(chunks, rank, sight)
        self._read = read_by(chunks, rank, sight)
        self._out = [sum(reader == other for reader, _ in self._read) for other in range(chunks.ranks)]
        self._in = [sum(chunks.owner(chunk) == other for chunk in self.wanted) for other in range(chunks.ranks)]

    def _start(self, pieces: list[Tensor], sent: list[int], received: list[int]) -> Pending:
        tensor = torch.stack(pieces) if pieces else self._like.new_empty((0, *self._like.shape))
        return start_all_to_all(tensor, self._shared.mesh, AXIS, sent, received)

    def start(self, held: dict[int, Tensor]) -> Pending:
        """Begin to send this rank's chunks to their readers."""
        return self._start([held[chunk] for _, chunk in self._read], self._out, self._in)

    def take(self, pending: Pending) -> dict[int, Tensor]:
        """The others' chunks, once they are here."""
        return dict(zip(self.wanted, pending.wait().unbind(), strict=True))

    def give_back(self, grads: dict[int, Tensor]) -> list[tuple[int, Tensor]]:
        """Exchange gradients: those that others have found of this rank's chunks for those that it has found of theirs."""
        pieces = [grads[chunk] if chunk in grads else torch.zeros_like(self._like) for chunk in self.wanted]
        found = self._start(pieces, self._in, self._out).wait()
        return [(chunk, part) for (_, chunk), part in zip(self._read, found.unbind(), strict=True)]


class Ring:
    """Passes on to the next rank the tensors that this one holds.

    Args:
        shared: the sequence.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared, self._ranks = shared, shared.chunks.ranks

    def start(self, pieces: list[Tensor]) -> Pending:
        """Begin to hand chunks on."""
        rank, ranks = self._shared.rank, self._ranks
        sent, received = (
            [len(pieces) * (other == to % ranks) for other in range(ranks)] for to in (rank + 1, rank - 1)
        )
        return start_all_to_all(torch.stack(pieces), self._shared.mesh, AXIS, sent, received)

    def owner(self, step: int) -> tuple[int, ...]:
        """The chunks that are here after so many steps."""
        return self._shared.chunks.of((self._shared.rank - step) % self._ranks)


def to_heads(query: Tensor, key: Tensor, value: Tensor, shared: Shared, heads: Heads) -> tuple[Tensor, ...]:
    """All tokens of this rank's heads, (batch, heads / ranks, padded, features), of those of all heads' share of them.

    Heads of keys and values that do not divide by the ranks are repeated until they do: a rank has those of its queries.

    Raises:
        ValueError: heads of queries do not divide.
    """
    ranks = shared.chunks.ranks
    if not heads.fit(ranks):
        raise ValueError(
            f'attention by "heads" gives each of the {ranks} ranks that share a sequence as many heads, and {heads.queries} do not '
            'divide so; use "gather", "ring" or "auto", or have a divisor of them share'
        )
    copies = heads.copies(ranks)
    if copies > 1:
        key, value = (tensor.repeat_interleave(copies, 1) for tensor in (key, value))
    return _ToHeads.apply(shared, query, key, value)


def to_tokens(output: Tensor, shared: Shared) -> Tensor:
    """This rank's tokens of all heads, (batch, heads, share, features), of all tokens of its heads'."""
    return _ToTokens.apply(output, shared)


def _deal(tensors: tuple[Tensor, ...], shared: Shared) -> tuple[Tensor, ...]:
    """(batch, heads, share, features) of each rank → (batch, heads / ranks, padded, features), tokens in their order."""
    ranks, size = shared.chunks.ranks, shared.chunks.size
    dealt = [tensor.unflatten(1, (ranks, -1)).movedim(1, 0) for tensor in tensors]
    rows, parts = _rows([part.shape for part in dealt], tensors[0])
    for part, tensor in zip(parts, dealt, strict=True):
        part.copy_(tensor)
    made = []
    for part in _swapped(rows, parts, shared):
        first, last = part.unflatten(3, (2, size)).unbind(3)
        whole = part.new_empty((*part.shape[1:3], 2 * ranks, size, part.shape[-1]))
        whole[:, :, :ranks].copy_(first.movedim(0, 2))
        whole[:, :, ranks:].copy_(last.flip(0).movedim(0, 2))
        made.append(whole.flatten(2, 3))
    return tuple(made)


def _collect(tensors: tuple[Tensor, ...], shared: Shared) -> tuple[Tensor, ...]:
    """The way back."""
    ranks, size = shared.chunks.ranks, shared.chunks.size
    shapes = [(ranks, *tensor.shape[:2], 2 * size, tensor.shape[-1]) for tensor in tensors]
    rows, parts = _rows(shapes, tensors[0])
    for part, tensor in zip(parts, tensors, strict=True):
        first, last = tensor.unflatten(2, (2, ranks, size)).unbind(2)
        part[:, :, :, :size].copy_(first.movedim(2, 0))
        part[:, :, :, size:].copy_(last.flip(2).movedim(2, 0))
    return tuple(part.movedim(0, 1).flatten(1, 2) for part in _swapped(rows, parts, shared))


def _rows(shapes: Sequence[Sequence[int]], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """A row for each rank, and where parts of these shapes, of which dim 0 is that of ranks, lie in them."""
    sizes = [math.prod(shape[1:]) for shape in shapes]
    rows = like.new_empty((shapes[0][0], sum(sizes)))
    return rows, [row.view(*shape) for row, shape in zip(rows.split(sizes, 1), shapes, strict=True)]


def _swapped(rows: Tensor, parts: list[Tensor], shared: Shared) -> list[Tensor]:
    """The parts that other ranks have for this one, in one message from each."""
    one_each = [1] * shared.chunks.ranks
    found = start_all_to_all(rows, shared.mesh, AXIS, one_each, one_each).wait()
    sizes = [part[0].numel() for part in parts]
    return [row.view(part.shape) for row, part in zip(found.split(sizes, 1), parts, strict=True)]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: Shared, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.shared = shared
        return _deal(tensors, shared)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_collect(grads, ctx.shared)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, shared: Shared) -> Tensor:
        ctx.shared = shared
        return _collect((output,), shared)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _deal((grad,), ctx.shared)[0], None
