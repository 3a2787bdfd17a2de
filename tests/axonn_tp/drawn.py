"""Models of one or two streams of tokens, drawn from a seed: how they branch, share, flatten, cache and recompute differs."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from axonn_tp import LayerPlan

HIDDEN, HEADS, VOCABULARY = 24, 12, 31
PLAN = {
    "*source": LayerPlan("embedding"),
    "*target": LayerPlan("embedding"),
    "*places": LayerPlan("embedding"),
    "*norm?": LayerPlan("norm"),
    "*.qkv": LayerPlan("normal", parts=3, heads=HEADS),
    "*.q": LayerPlan("normal", heads=HEADS, reads="x"),
    "*.[kv]": LayerPlan("normal", heads=HEADS, reads="memory"),
    "*.proj": LayerPlan("transposed"),
    "*.up": LayerPlan("normal"),
    "*.down": LayerPlan("transposed"),
    "head": LayerPlan("head"),
}


def heads(x: Tensor) -> Tensor:
    """(batch, tokens, features) → (batch, heads, tokens, 2)."""
    return x.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)


class Attention(nn.Module):
    """Of a stream to itself, or to another; with or without the sequences flattened before the last layer."""

    def __init__(self, draw: random.Random, crosses: bool) -> None:
        super().__init__()
        self.crosses, self.flat, self.p = crosses, draw.random() < 0.4, draw.choice((0.0, 0.3))
        if crosses:
            self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN, bias=name != "k") for name in "qkv")
        else:
            self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.proj = nn.Linear(HIDDEN, HIDDEN)

    def memory(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, which several calls may read."""
        return heads(self.k(x)), heads(self.v(x))

    def forward(self, x: Tensor, memory: tuple[Tensor, Tensor] | None = None) -> Tensor:
        if memory is not None:
            q, (k, v) = heads(self.q(x)), memory
        else:
            q, k, v = (heads(part) for part in self.qkv(x).chunk(3, -1))
        p = self.p if self.training else 0.0
        found = F.scaled_dot_product_attention(q, k, v, is_causal=memory is None, dropout_p=p).transpose(1, 2)
        if not self.flat:
            return self.proj(found.flatten(2))
        return self.proj(found.reshape(-1, found.shape[2] * found.shape[3])).view(x.shape)


class Mlp(nn.Module):
    """Two layers, on the sequences or on all rows at once."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.flat, self.gated = draw.random() < 0.5, draw.random() < 0.5
        self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)
        self.drop = nn.Dropout(draw.choice((0.0, 0.3)))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]) if self.flat else x
        inner = self.up(rows)
        if self.gated:
            # A dropout of the stream while the inner activation waits.
            rows = self.drop(rows)
        inner = self.drop(F.silu(inner))
        return (self.down(inner) + rows).view(x.shape)


class Block(nn.Module):
    """A layer of one stream, which may read the other."""

    def __init__(self, draw: random.Random, crosses: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(HIDDEN) for _ in range(3))
        self.own, self.other = Attention(draw, False), Attention(draw, True) if crosses else None
        self.mlp, self.again = Mlp(draw), draw.choice((None, None, True, False))

    def forward(self, x: Tensor, memory: tuple[Tensor, Tensor] | None = None) -> Tensor:
        if self.again is None or not torch.is_grad_enabled():
            return self._inner(x, *(memory or ()))
        return checkpoint(self._inner, x, *(memory or ()), use_reentrant=self.again)

    def _inner(self, x: Tensor, *memory: Tensor) -> Tensor:
        x = x + self.own(self.norm1(x))
        if self.other is not None and memory:
            x = x + self.other(self.norm3(x), (memory[0], memory[1]))
        return x + self.mlp(self.norm2(x))


class Streams(nn.Module):
    """Encoder and decoder, or two calls of one encoder."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.how = draw.choice(("crossing", "crossing", "siamese", "side by side"))
        self.source = nn.Embedding(VOCABULARY, HIDDEN)
        self.target = self.source if draw.random() < 0.4 else nn.Embedding(VOCABULARY, HIDDEN)
        self.places = nn.Embedding(9, HIDDEN) if draw.random() < 0.5 else None
        self.encoder = nn.ModuleList(Block(draw, False) for _ in range(draw.randint(1, 2)))
        self.decoder = nn.ModuleList(Block(draw, self.how == "crossing") for _ in range(draw.randint(1, 2)))
        # Keys and values of all layers before the decoder's own tokens are looked up, or each when it is needed.
        self.cached, self.drop = draw.random() < 0.5, nn.Dropout(draw.choice((0.0, 0.3)))
        self.normz, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.flat_head = draw.random() < 0.3

    def _start(self, table: nn.Module, ids: Tensor) -> Tensor:
        x = table(ids)
        if self.places is not None:
            x = x + self.places(torch.arange(ids.shape[1]))
        return self.drop(x)

    def _end(self, x: Tensor) -> Tensor:
        x = self.normz(x)
        if self.flat_head:
            return self.head(x.flatten(0, 1))
        return self.head(x).flatten(0, 1)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        x = self._start(self.source, a)
        if self.how == "side by side":
            y = self._start(self.target, b)
            for one, other in zip(self.encoder, self.decoder, strict=False):
                x, y = one(x), other(y)
            return self._end(x), self._end(y)
        for block in self.encoder:
            x = block(x)
        if self.how == "siamese":
            y = self._start(self.source, b)
            for block in self.encoder:
                y = block(y)
            return self._end(x), self._end(y)
        memories: list[Callable] = [lambda block=block, x=x: block.other.memory(x) for block in self.decoder]
        if self.cached:
            known = [make() for make in memories]
            memories = [lambda pair=pair: pair for pair in known]
        y = self._start(self.target, b)
        for block, memory in zip(self.decoder, memories, strict=True):
            y = block(y, memory())
        return self._end(x), self._end(y)
