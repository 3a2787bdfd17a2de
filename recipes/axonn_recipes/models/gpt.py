"""A GPT in plain PyTorch: pre-norm blocks, learned positions, no dropout. It knows nothing of parallelism.

Widths are read from the tensors, never from the configuration, so that the same code runs on a share of the
heads and features. Every module initialises itself in `reset_parameters`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT: vocabulary and context in tokens, the rest in features."""

    vocabulary: int = 256
    context: int = 128
    layers: int = 4
    heads: int = 8
    hidden: int = 256
    tied: bool = False


class Linear(nn.Linear):
    """`nn.Linear` with GPT-2's initialisation; `depth` > 0 scales a projection into the residual stream by 1/√(2·depth)."""

    def __init__(self, in_features: int, out_features: int, depth: int = 0, bias: bool = True) -> None:
        self.std = 0.02 / math.sqrt(2 * depth) if depth else 0.02
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        """Normal weights, zero bias."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """`nn.Embedding` with GPT-2's initialisation."""

    def reset_parameters(self) -> None:
        """Normal entries."""
        nn.init.normal_(self.weight, std=0.02)


class Attention(nn.Module):
    """Causal self-attention, (batch, tokens, hidden) → the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size = config.hidden // config.heads
        self.qkv = Linear(config.hidden, 3 * config.hidden)
        self.proj = Linear(config.hidden, config.hidden, depth=config.layers)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        q, k, v = (t.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a four times wider MLP, each behind a LayerNorm and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.ln2 = nn.LayerNorm(config.hidden)
        self.fc1 = Linear(config.hidden, 4 * config.hidden)
        self.fc2 = Linear(4 * config.hidden, config.hidden, depth=config.layers)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = x + self.attention(self.ln1(x))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A decoder-only transformer.

    Args:
        config: sizes.

    Raises:
        ValueError: heads do not divide hidden.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.hidden % config.heads:
            raise ValueError(f"hidden = {config.hidden} does not divide into {config.heads} heads; choose a multiple")
        self.config = config
        self.tokens = Embedding(config.vocabulary, config.hidden)
        self.positions = Embedding(config.context, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = Linear(config.hidden, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        self.loss = nn.CrossEntropyLoss()

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Mean loss in nats a token where targets are given, else logits (batch, tokens, vocabulary).

        Args:
            ids: (batch, tokens) token ids.
            targets: (batch, tokens) ids of the tokens that follow.
        """
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return self.mean_loss(logits, targets)

    def mean_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean loss in nats a token."""
        logits = logits.flatten(0, 1)
        return self.loss(logits.float() if logits.element_size() < 4 else logits, targets.flatten())
