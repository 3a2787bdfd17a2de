"""Attention over a sequence whose tokens lie on several ranks: as torch's scaled_dot_product_attention on one, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from axonn_tp.context.chunks import Block, Heads, Sight, blocks, cheaper
from axonn_tp.context.kernel import Merged, Scores, backward, forward, sink_gradient
from axonn_tp.context.shared import Shared, places_of
from axonn_tp.context.travel import Exchange, Ring, to_heads, to_tokens
from axonn_tp.layers.activation import split_of
from axonn_tp.layers.dropout import forked


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
    """The output of this rank's queries on the keys and values of all ranks.

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
        ValueError: a shape is not that of a share; heads are to be dealt out that do not divide by the ranks.
    """
    share = shared.chunks.share
    held = key.shape[-2] if key.shape[-2] == shared.chunks.padded else share
    for name, tensor, tokens in (("query", query, share), ("key", key, held), ("value", value, held)):
        if tensor.shape[-2] != tokens:
            raise ValueError(
                f"attention over {shared.chunks.ranks} ranks: the {name} of shape {tuple(tensor.shape)} has {tensor.shape[-2]} tokens, and "
                f"a rank's share of {shared.chunks.tokens} has {share}; give it this rank's tokens, all of them and no others"
            )
    kind = query.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    if autocast:
        query, key, value = (_as_under_autocast(one) for one in (query, key, value))
    scores = Scores(1 / math.sqrt(query.shape[-1]) if scale is None else scale, softcap or 0.0, dropout)
    if seed is None:
        seed = drawn_seed(query) if dropout else 0
    heads = Heads(len(query), query.shape[1], key.shape[1], query.shape[-1], value.shape[-1])
    sight = sight or Sight()
    how = "here" if held != share else shared.how or cheaper(shared.chunks, sight, heads)
    if how == "heads":
        query, key, value = to_heads(query, key, value, shared, heads)
        sink = None if sink is None else sink.chunk(shared.chunks.ranks)[shared.rank]
    # Scores are made in float32, here and in backward.
    with torch.autocast(kind, enabled=False) if autocast else nullcontext():
        made = _Attention.apply(query, key, value, sink, shared, how, sight, documents, scores, seed)
    return to_tokens(made, shared) if how == "heads" else made


def _as_under_autocast(tensor: Tensor) -> Tensor:
    """A tensor in the type that autocast gives torch's attention; queries and values may come in different ones."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.get_autocast_dtype(tensor.device.type))


def drawn_seed(query: Tensor) -> int:
    """A seed of dropout, another one on ranks of x and y that have other heads."""
    split = split_of(query)
    with nullcontext() if split is None else forked(split.place, query.device):
        return int(torch.randint(2**31, ()))


class _Work:
    """One layer's blocks on this rank: of its own queries, or by heads of all.

    Attributes:
        mine: chunks of the keys that were given.
    """

    def __init__(
        self, shared: Shared, how: str, sight: Sight, documents: Tensor | None, scores: Scores, seed: int
    ) -> None:
        self.shared, self.chunks, self.how, self.sight = shared, shared.chunks, how, sight
        self._documents, self._scores = documents, scores
        # Ranks that have other queries, or other heads, may come with the same.
        self._seed = seed + 500_009 * shared.rank
        self._rank = None if how == "heads" else shared.rank
        self.mine = self.chunks.of(shared.rank if how in ("gather", "ring") else None)
        self.blocks = blocks(self.chunks, self._rank, sight, documents is not None)
        self._kept: dict[Block, tuple] = {}

    def of(self, held: Sequence[int]) -> list[Block]:
        """Blocks of some of the keys."""
        return [part for block in self.blocks if (part := block.of(held)).keys]

    def _mask(self, block: Block, device: torch.device) -> Tensor | None:
        if block.how != "masked":
            return None
        first, last = (row // self.chunks.size for row in block.rows)
        q = places_of(self.chunks, self.chunks.of(self._rank)[first:last], device)
        k = places_of(self.chunks, block.keys, device)
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

    def forward(self, q: Tensor, keys: _Keys, block: Block, merged: Merged) -> None:
        """Add one block's part of the output."""
        k, v = keys.of(block)
        made = forward(_rows(q, block), k, v, *self._arguments(block, q.device))
        out, lse, self._kept[block] = made
        merged.add(block.rows, out, lse)

    def backward(self, given: tuple[Tensor, ...], keys: _Keys, block: Block, sums: _Sums) -> None:
        """Add one block's gradients, given the output's, queries, output and log-sum-exp."""
        grad, q, out, lse = (_rows(tensor, block) for tensor in given)
        k, v = keys.of(block)
        arguments = self._arguments(block, q.device)
        sums.add(block, *backward(grad, q, k, v, out, lse, *arguments, self._kept[block]))


def _rows(tensor: Tensor, block: Block) -> Tensor:
    return tensor[:, :, slice(*block.rows)]


class _Keys:
    """Keys and values that are here.

    Attributes:
        given: keys, and values, of the chunks `_Work.mine`.
        others: both side by side, by chunk.
    """

    def __init__(self, work: _Work, k: Tensor, v: Tensor) -> None:
        self.work, self.given, self.others = work, (k, v), dict[int, Tensor]()

    @property
    def like(self) -> Tensor:
        """An empty tensor of a chunk's shape as it travels."""
        k, v = self.given
        return k.new_empty((*k.shape[:2], self.work.chunks.size, k.shape[-1] + v.shape[-1]))

    def exchange(self) -> Exchange | None:
        """The gathering of other ranks' keys and values; None where nothing is gathered."""
        return Exchange(self.work.shared, self.work.sight, self.like) if self.work.how == "gather" else None

    def split(self, pair: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that are side by side."""
        k, v = pair.split([one.shape[-1] for one in self.given], -1)
        return k, v

    def packed(self) -> dict[int, Tensor]:
        """The given ones as they travel."""
        return dict(zip(self.work.mine, torch.cat(self.given, -1).split(self.work.chunks.size, 2), strict=True))

    def at(self, tensor: Tensor, chunk: int) -> Tensor:
        """A chunk of what is as long as the given ones."""
        return tensor.narrow(2, self.work.mine.index(chunk) * self.work.chunks.size, self.work.chunks.size)

    def of(self, block: Block) -> tuple[Tensor, Tensor]:
        """A block's, all of which are given, or others'."""
        if block.keys == self.work.mine:
            return self.given
        if block.keys[0] in self.work.mine:
            k, v = (torch.cat([self.at(one, chunk) for chunk in block.keys], 2) for one in self.given)
            return k, v
        return self.split(torch.cat([self.others[chunk] for chunk in block.keys], 2))


class _Sums:
    """Gradients of queries, and of keys and values as in `_Keys`."""

    def __init__(self, keys: _Keys, q: Tensor) -> None:
        self._keys, self._like = keys, (q, *keys.given)
        self._made: list[Tensor] | None = None
        self.others: dict[int, Tensor] = {}

    @property
    def given(self) -> list[Tensor]:
        """Zeros like the queries, keys and values that were given, to which gradients are added."""
        if self._made is None:
            self._made = [torch.zeros_like(one) for one in self._like]
        return self._made

    def add(self, block: Block, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """One block's."""
        work = self._keys.work
        if self._made is None and block.keys == work.mine and dq.shape == self._like[0].shape:
            self._made = [dq, dk, dv]
            return
        _rows(self.given[0], block).add_(dq)
        if block.keys[0] in work.mine:
            for whole, grad in zip(self.given[1:], (dk, dv), strict=True):
                for chunk, part in zip(block.keys, grad.split(work.chunks.size, 2), strict=True):
                    self._keys.at(whole, chunk).add_(part)
            return
        for chunk, part in zip(block.keys, torch.cat([dk, dv], -1).split(work.chunks.size, 2), strict=True):
            self.others[chunk] = self.others[chunk] + part if chunk in self.others else part

    def home(self, chunk: int, part: Tensor) -> None:
        """Add what others have found of a given chunk."""
        for whole, grad in zip(self.given[1:], self._keys.split(part), strict=True):
            self._keys.at(whole, chunk).add_(grad)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        shared: Shared,
        how: str,
        sight: Sight,
        documents: Tensor | None,
        scores: Scores,
        seed: int,
    ) -> Tensor:
        work = _Work(shared, how, sight, documents, scores, seed)
        merged, keys = Merged(q, v.shape[-1], sink), _Keys(work, k, v)
        for block in _arriving(keys, keys.exchange()):
            work.forward(q, keys, block, merged)
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
        given, keys = (grad, q, out, lse), _Keys(work, k, v)
        sums, exchange = _Sums(keys, q), keys.exchange()
        for block in _arriving(keys, exchange, sums):
            work.backward(given, keys, block, sums)
        if exchange is not None:
            for chunk, part in exchange.give_back(sums.others):
                sums.home(chunk, part)
        d_sink = None if sink is None else sink_gradient(sink, grad, out, lse)
        return *sums.given, d_sink, *[None] * 6


def _arriving(keys: _Keys, exchange: Exchange | None, sums: _Sums | None = None) -> Iterator[Block]:
    """Blocks whose keys are here, one by one; the others' come while those are computed.

    Args:
        keys: get others' as they come.
        exchange: of the layer; None where it does not gather.
        sums: in backward; by a ring the gradients of others' keys follow these, one step later, until they are home.
    """
    work = keys.work
    if work.how == "ring":
        yield from _around(keys, sums)
        return
    if exchange is None:
        yield from work.of(work.mine)
        return
    pending = exchange.start(keys.packed())
    yield from work.of(work.mine)
    keys.others = exchange.take(pending)
    yield from work.of(exchange.wanted)


def _around(keys: _Keys, sums: _Sums | None) -> Iterator[Block]:
    work, ring = keys.work, Ring(keys.work.shared)
    held, summing = keys.packed(), None
    for step in range(work.chunks.ranks):
        coming = ring.start(list(held.values())) if step + 1 < work.chunks.ranks else None
        yield from work.of(ring.owner(step))
        if step and sums is not None:
            found = [sums.others.pop(chunk, None) for chunk in ring.owner(step)]
            pieces = [torch.zeros_like(keys.like) if piece is None else piece for piece in found]
            if summing is not None:
                pieces = [piece + so_far for piece, so_far in zip(pieces, summing.wait().unbind(), strict=True)]
            summing = ring.start(pieces)
        if coming is not None:
            held = keys.others = dict(zip(ring.owner(step + 1), coming.wait().unbind(), strict=True))
    if summing is not None and sums is not None:
        for chunk, part in zip(work.mine, summing.wait().unbind(), strict=True):
            sums.home(chunk, part)
