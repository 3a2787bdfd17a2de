"""The model as layers of a pipeline, or in their order in one module, as a DeepSpeed script has them; experts are DeepSpeed's."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from deepspeed.moe.layer import MoE  # noqa: E402
from deepspeed.pipe import LayerSpec  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from axonn_recipes.bench_all.settings import Settings, Way  # noqa: E402
from axonn_recipes.bench_all.weights import drawn  # noqa: E402

VOCABULARY = 256


class Words(nn.Module):
    """Embeddings of bytes and of their places."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, settings.hidden)
        self.positions = nn.Embedding(settings.context, settings.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, tokens) to (batch, tokens, hidden)."""
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.head_size = settings.hidden // settings.heads
        self.q, self.k, self.v, self.out = (nn.Linear(settings.hidden, settings.hidden, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) to the same."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Expert(nn.Module):
    """A feed-forward layer."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.up = nn.Linear(settings.hidden, settings.width, bias=False)
        self.down = nn.Linear(settings.width, settings.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) to the same."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and a mixture of experts, each behind a LayerNorm and added to the stream."""

    def __init__(self, settings: Settings, ep_size: int) -> None:
        super().__init__()
        gates: dict[str, Any] = {"use_rts": False, "top2_2nd_expert_sampling": False, "drop_tokens": False}
        self.ln1, self.attention = nn.LayerNorm(settings.hidden), Attention(settings)
        self.ln2 = nn.LayerNorm(settings.hidden)
        self.moe = MoE(settings.hidden, Expert(settings), settings.experts, ep_size, k=settings.k, **gates)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) to the same."""
        x = x + self.attention(self.ln1(x))
        return x + self.moe(self.ln2(x))[0]


class Head(nn.Module):
    """Scores of bytes."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(settings.hidden), nn.Linear(settings.hidden, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) to (batch, tokens, vocabulary)."""
        return self.head(self.norm(x))


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean over tokens, in nats."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def specs(settings: Settings, way: Way) -> list[LayerSpec]:
    """All layers."""
    blocks = [LayerSpec(Block, settings, way.experts) for _ in range(settings.layers)]
    return [LayerSpec(Words, settings), *blocks, LayerSpec(Head, settings)]


class Whole(nn.Module):
    """The layers in their order, and the loss; parameters have the names that a pipeline gives them."""

    def __init__(self, settings: Settings, way: Way) -> None:
        super().__init__()
        for number, spec in enumerate(specs(settings, way)):
            self.add_module(str(number), spec.build())

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean loss."""
        x: Any = ids
        for layer in self.children():
            x = layer(x)
        return loss_of(x, targets)


@torch.no_grad()
def fill(model: nn.Module, settings: Settings, first_expert: int) -> None:
    """Draw the weights of a model of this rank; LayerNorms stay ones and zeros.

    Args:
        model: its parameters are named as those of `Whole`.
        settings: of the run.
        first_expert: the number of the first expert that this rank has.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.copy_(drawn(settings, _serial(name, first_expert), tuple(parameter.shape)))


def _serial(name: str, first_expert: int) -> str:
    place, _, rest = name.removesuffix(".weight").partition(".")
    before, experts, after = rest.partition(".deepspeed_experts.")
    if experts:
        number, _, which = after.partition(".")
        rest = f"experts.{int(number) + first_expert}.{which}"
    else:
        rest = before.replace("moe.deepspeed_moe.gate.wg", "router")
    return f"{place}.{rest}"
