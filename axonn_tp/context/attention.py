"""Attention over a sequence whose tokens lie on several ranks: as torch's scaled_dot_product_attention on one, forward and backward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from axonn_tp.comm.collectives import Pending, start_all_to_all
from axonn_tp.context.chunks import HOW, Block, Chunks, Sight, blocks, cheaper, needed, read_by
from axonn_tp.context.kernel import Merged, Scores, backward, forward, sink_gradient
from axonn_tp.grid.mesh import Axes

AXIS = "sequence"


@dataclass(frozen=True)
class Shared:
    """A sequence over the ranks of a mesh's axis ``"sequence"``.

    Attributes:
        mesh: has that axis.
        chunks: the sequence.
        how: ``"gather"`` or ``"ring"``; None for what `cheaper` says.
    """

    mesh: Axes
    chunks: Chunks
    how: str | None = None

    def __post_init__(self) -> None:
        if self.how is not None and self.how not in HOW:
            raise ValueError(f'how = {self.how!r} is not known; use "gather", "ring" or None')

    @property
    def rank(self) -> int:
        """This rank's place."""
        return self.mesh.rank(AXIS)

    def places(self, device: torch.device) -> Tensor:
        """The places in the padded sequence of this rank's tokens."""
        return torch.tensor(self.chunks.places(self.rank), device=device)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shared: Shared,
    sight: Sight | None = None,
    documents: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout: float = 0.0,
    sink: Tensor | None = None,
    seed: int | None = None,
) -> Tensor:
    """This rank's queries on the keys and values of all ranks.

    Args:
        query: (batch, heads, share, head): this rank's tokens (`Chunks.places`).
        key: (batch, groups, share, head); groups divides heads, and only the groups travel. Or (batch, groups, padded, head): those of
            all ranks in their order, of which then none travels.
        value: (batch, groups, share or padded, head of the output).
        shared: the sequence.
        sight: what a query sees by its place; causal when None.
        documents: (batch or 1, padded), whole numbers for the whole padded sequence: a query sees keys of its own number alone.
            Keys below 0 are padding and not seen; queries below 0 see all others.
        scale: times q·k; 1/√head when None.
        softcap: see `Scores`.
        dropout: of probabilities, drawn by every rank for itself.
        sink: (heads,), see `Merged`.
        seed: of dropout; drawn when None.

    Returns:
        (batch, heads, share, head of the output).

    Raises:
        ValueError: a shape is not that of a share.
    """
    share = shared.chunks.share
    held = key.shape[-2] if key.shape[-2] == shared.chunks.padded else share
    for name, tensor, tokens in (("query", query, share), ("key", key, held), ("value", value, held)):
        if tensor.shape[-2] != tokens:
            raise ValueError(
                f"attention over {shared.chunks.ranks} ranks: the {name} of shape {tuple(tensor.shape)} has {tensor.shape[-2]} tokens, and "
                f"a rank's share of {shared.chunks.tokens} has {share}; give it this rank's tokens, all of them and no others"
            )
    scores = Scores(1 / math.sqrt(query.shape[-1]) if scale is None else scale, softcap or 0.0, dropout)
    if seed is None:
        seed = int(torch.randint(2**31, ())) if dropout else 0
    return _Attention.apply(query, key, value, sink, shared, sight or Sight(), documents, scores, seed)


class _Work:
    """One layer's blocks on this rank."""

    def __init__(
        self, shared: Shared, sight: Sight, documents: Tensor | None, scores: Scores, seed: int, value: Tensor
    ) -> None:
        self.shared, self.chunks, self.sight, self.head = shared, shared.chunks, sight, value.shape[-1]
        self._documents, self._scores, self._seed = documents, scores, seed
        self.mine = self.chunks.of(shared.rank)
        self.blocks = blocks(self.chunks, shared.rank, sight, documents is not None)
        here = value.shape[-2] == self.chunks.padded > self.chunks.share
        self.how = "here" if here else shared.how or cheaper(self.chunks, sight)
        self.held = tuple(range(2 * self.chunks.ranks)) if here else self.mine
        self._kept: dict[Block, tuple] = {}

    def local(self) -> list[Block]:
        """Blocks of this rank's keys."""
        return [part for block in self.blocks if (part := block.of(self.mine)).keys]

    def of(self, held: tuple[int, ...]) -> list[Block]:
        """Blocks of some of the others' keys."""
        return [part for block in self.blocks if (part := block.of(held)).keys]

    def rows(self, tensor: Tensor, block: Block) -> Tensor:
        """A block's queries."""
        return tensor[:, :, slice(*block.rows)]

    def _mask(self, block: Block, device: torch.device) -> Tensor | None:
        if block.how != "masked":
            return None
        size = self.chunks.size
        q = self.shared.places(device)[slice(*block.rows)]
        k = torch.cat([torch.arange(chunk * size, (chunk + 1) * size, device=device) for chunk in block.keys])
        apart = q[:, None] - k
        seen = apart >= 0 if self.sight.causal else torch.ones_like(apart, dtype=torch.bool)
        if self.sight.window is not None:
            seen = seen & (apart < self.sight.window)
        seen = seen[None]
        if self._documents is not None:
            mine, others = self._documents[:, q, None], self._documents[:, None, k]
            seen = seen & (others >= 0) & ((mine == others) | (mine < 0))
        return seen[:, None]

    def _arguments(self, block: Block, device: torch.device) -> tuple[Scores, bool, Tensor | None, int]:
        seed = self._seed + 1009 * block.keys[0] + block.rows[0]
        return self._scores, block.how == "causal", self._mask(block, device), seed

    def forward(self, q: Tensor, held: dict[int, Tensor], block: Block, merged: Merged) -> None:
        """Add one block's part of the output."""
        k, v = self._keys(held, block)
        out, lse, self._kept[block] = forward(self.rows(q, block), k, v, *self._arguments(block, q.device))
        merged.add(block.rows, out, lse)

    def _keys(self, held: dict[int, Tensor], block: Block) -> tuple[Tensor, Tensor]:
        both = torch.cat([held[chunk] for chunk in block.keys], 2)
        return both[..., : -self.head], both[..., -self.head :]

    def backward(
        self,
        given: tuple[Tensor, Tensor, Tensor, Tensor],
        held: dict[int, Tensor],
        block: Block,
        dq: Tensor,
        grads: dict[int, Tensor],
    ) -> None:
        """Add one block's gradients.

        Args:
            given: the output's gradient, queries, output and log-sum-exp.
            held: keys and values by chunk.
            block: the block.
            dq: gets that of the queries.
            grads: get those of keys and values, by chunk.
        """
        grad, q, out, lse = (self.rows(t, block) for t in given)
        k, v = self._keys(held, block)
        arguments = self._arguments(block, q.device)
        d_rows, dk, dv = backward(grad, q, k, v, out, lse, *arguments, self._kept[block])
        self.rows(dq, block).add_(d_rows)
        for chunk, part in zip(block.keys, torch.cat([dk, dv], -1).split(self.chunks.size, 2), strict=True):
            grads[chunk] = grads[chunk] + part if chunk in grads else part


def _split(keys: Tensor, value: Tensor, work: _Work) -> dict[int, Tensor]:
    """The keys and values that were given side by side, by chunk."""
    return dict(zip(work.held, torch.cat([keys, value], -1).split(work.chunks.size, 2), strict=True))


class _Exchange:
    """Chunks to all their readers at once, and gradients back to their owners."""

    def __init__(self, work: _Work, like: Tensor) -> None:
        self._shared, self._like = work.shared, like
        rank, ranks = work.shared.rank, work.chunks.ranks
        self.wanted = needed(work.chunks, rank, work.sight)
        self._read = list(read_by(work.chunks, rank, work.sight))
        self._out = [sum(reader == other for reader, _ in self._read) for other in range(ranks)]
        self._in = [sum(work.chunks.owner(chunk) == other for chunk in self.wanted) for other in range(ranks)]

    def _start(self, pieces: list[Tensor], sent: list[int], received: list[int]) -> Pending:
        tensor = torch.stack(pieces) if pieces else self._like.new_empty((0, *self._like.shape))
        return start_all_to_all(tensor, self._shared.mesh, AXIS, sent, received)

    def start(self, held: dict[int, Tensor]) -> Pending:
        """Begin to send this rank's chunks to their readers."""
        return self._start([held[chunk] for _, chunk in self._read], self._out, self._in)

    def take(self, pending: Pending, held: dict[int, Tensor]) -> None:
        """Wait for the others' chunks."""
        held.update(zip(self.wanted, pending.wait().unbind(), strict=True))

    def give_back(self, grads: dict[int, Tensor]) -> None:
        """Sum the gradients of each chunk where it belongs."""
        pieces = [grads.pop(chunk, None) for chunk in self.wanted]
        whole = [torch.zeros_like(self._like) if piece is None else piece for piece in pieces]
        found = self._start(whole, self._in, self._out).wait()
        for (_, chunk), part in zip(self._read, found.unbind(), strict=True):
            grads[chunk] = grads[chunk] + part


class _Ring:
    """What a rank holds, to the next one."""

    def __init__(self, work: _Work) -> None:
        self._shared, self._chunks = work.shared, work.chunks

    def start(self, pieces: list[Tensor]) -> Pending:
        """Begin to hand chunks on."""
        rank, ranks = self._shared.rank, self._chunks.ranks
        sent, received = ([len(pieces) * (other == to) for other in range(ranks)] for to in self._neighbours(rank))
        return start_all_to_all(torch.stack(pieces), self._shared.mesh, AXIS, sent, received)

    def _neighbours(self, rank: int) -> tuple[int, int]:
        return (rank + 1) % self._chunks.ranks, (rank - 1) % self._chunks.ranks

    def owner(self, step: int) -> tuple[int, int]:
        """The chunks that are here after so many steps."""
        return self._chunks.of((self._shared.rank - step) % self._chunks.ranks)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        shared: Shared,
        sight: Sight,
        documents: Tensor | None,
        scores: Scores,
        seed: int,
    ) -> Tensor:
        work = _Work(shared, sight, documents, scores, seed, v)
        merged, held = Merged(q, v.shape[-1], sink), _split(k, v, work)

        def compute(parts: list[Block]) -> None:
            for block in parts:
                work.forward(q, held, block, merged)

        if work.how == "here":
            compute(work.of(work.held))
        elif work.how == "gather":
            exchange = _Exchange(work, held[work.mine[0]])
            pending = exchange.start(held)
            compute(work.local())
            exchange.take(pending, held)
            compute(work.of(exchange.wanted))
        else:
            ring, parts = _Ring(work), work.local()
            for step in range(shared.chunks.ranks):
                now = ring.owner(step)
                more = step + 1 < shared.chunks.ranks
                coming = ring.start([held[chunk] for chunk in now]) if more else None
                compute(parts if step == 0 else work.of(now))
                if coming is not None:
                    held = dict(zip(ring.owner(step + 1), coming.wait().unbind(), strict=True))
        out = merged.out.to(q.dtype)
        ctx.work = work
        # A query that sees nothing: its scores are −∞ whatever this is.
        ctx.save_for_backward(q, k, v, sink, out, merged.lse.masked_fill_(merged.lse == -math.inf, 0))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        work: _Work = ctx.work
        q, k, v, sink, out, lse = ctx.saved_tensors
        given, dq = (grad, q, out, lse), torch.zeros_like(q)
        held, grads = _split(k, v, work), dict[int, Tensor]()

        def compute(parts: list[Block]) -> None:
            for block in parts:
                work.backward(given, held, block, dq, grads)

        if work.how == "here":
            compute(work.of(work.held))
        elif work.how == "gather":
            exchange = _Exchange(work, held[work.mine[0]])
            pending = exchange.start(held)
            compute(work.local())
            exchange.take(pending, held)
            compute(work.of(exchange.wanted))
            exchange.give_back(grads)
        else:
            _ring_backward(work, held, grads, given, dq)
        unseen = torch.zeros_like(held[work.mine[0]])
        both = torch.cat([grads.get(chunk, unseen) for chunk in work.held], 2)
        d_sink = None if sink is None else sink_gradient(sink, grad, out, lse)
        return dq, both[..., : -work.head], both[..., -work.head :], d_sink, *[None] * 5


def _ring_backward(
    work: _Work,
    held: dict[int, Tensor],
    grads: dict[int, Tensor],
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    dq: Tensor,
) -> None:
    """Keys and values go round once more, and the gradients of others' behind them, one step later, until they are home."""
    ring, ranks = _Ring(work), work.chunks.ranks
    zero = torch.zeros_like(held[work.mine[0]])
    summing: Pending | None = None
    for step in range(ranks):
        now = ring.owner(step)
        pending = ring.start([held[chunk] for chunk in now]) if step + 1 < ranks else None
        mine = grads if step == 0 else dict[int, Tensor]()
        for block in work.local() if step == 0 else work.of(now):
            work.backward(given, held, block, dq, mine)
        if step:
            pieces = [mine.get(chunk, zero) for chunk in now]
            if summing is not None:
                pieces = [piece + so_far for piece, so_far in zip(pieces, summing.wait().unbind(), strict=True)]
            summing = ring.start(pieces)
        if pending is not None:
            held = dict(zip(ring.owner(step + 1), pending.wait().unbind(), strict=True))
    if summing is not None:
        for chunk, part in zip(work.mine, summing.wait().unbind(), strict=True):
            grads[chunk] = grads[chunk] + part
