"""A GPT whose every other feed-forward block is a mixture of experts; which layer that is, the caller says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_recipes.models.gpt import GPT, Attention, GPTConfig, Linear


class FeedForward(nn.Module):
    """Four times wider in the middle: the expert. (..., hidden) → the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc1 = Linear(config.hidden, 4 * config.hidden)
        self.fc2 = Linear(4 * config.hidden, config.hidden, depth=config.layers)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class MoEBlock(nn.Module):
    """Attention and a mixture of experts, each behind a LayerNorm and added to the stream."""

    def __init__(self, config: GPTConfig, moe: nn.Module) -> None:
        super().__init__()
        self.ln1, self.attention = nn.LayerNorm(config.hidden), Attention(config)
        self.ln2, self.moe = nn.LayerNorm(config.hidden), moe

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The stream, and the loss that balances the experts' load."""
        x = x + self.attention(self.ln1(x))
        output, l_aux, _ = self.moe(self.ln2(x))
        return x + output, l_aux


class MoEGPT(GPT):
    """A GPT with experts in every `every`-th block, from the second on where that is 2.

    Args:
        config: sizes of the base model.
        moe: given the hidden size and an expert, makes a layer with DeepSpeed-MoE's contract.
        every: 1: all blocks have experts.
        aux_weight: of the balancing losses beside the mean loss.
        checkpoint: calls a block for its input, as torch.utils.checkpoint.checkpoint does; None: all activations are kept.
    """

    def __init__(
        self,
        config: GPTConfig,
        moe: Callable[[int, nn.Module], nn.Module],
        every: int = 2,
        aux_weight: float = 0.01,
        checkpoint: Callable[[nn.Module, Tensor], Any] | None = None,
    ) -> None:
        super().__init__(config)
        self.aux_weight, self.checkpoint = aux_weight, checkpoint
        for place in range(every - 1, config.layers, every):
            self.blocks[place] = MoEBlock(config, moe(config.hidden, FeedForward(config)))

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """See `GPT`; the loss has the balancing losses in it while training."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        balance = x.new_zeros(())
        for block in self.blocks:
            x = self.checkpoint(block, x) if self.checkpoint is not None and self.training else block(x)
            if isinstance(x, tuple):
                x, l_aux = x
                balance = balance + l_aux
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        loss = self.mean_loss(logits, targets)
        return loss + self.aux_weight * balance if self.training else loss
