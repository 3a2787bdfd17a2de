"""Models whose experts are in lists, one module each, behind a container that is given (x, indices, weights)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, INNER, VOCABULARY = 16, 12, 50


class Gated(nn.Module):
    """An expert as Mixtral's."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(FEATURES, INNER, bias=False) for _ in range(2))
        self.w2 = nn.Linear(INNER, FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def stacked() -> nn.Module:
    """An expert whose layers have no names."""
    return nn.Sequential(nn.Linear(FEATURES, INNER), nn.GELU(), nn.Linear(INNER, FEATURES))


def normed() -> nn.Module:
    """An expert whose shares do not add up."""
    return nn.Sequential(nn.Linear(FEATURES, INNER), nn.LayerNorm(INNER), nn.Linear(INNER, FEATURES))


def mixed(experts: Any, number: int, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each token's experts, of which those without tokens are not called."""
    total = torch.zeros_like(x)
    for expert in range(number):
        token, place = (indices == expert).nonzero(as_tuple=True)
        if len(token):
            total = total.index_add(0, token, experts(expert, x[token]) * weights[token, place, None])
    return total


class Itself(nn.ModuleList):
    """A container that is the list."""

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return mixed(lambda number, rows: self[number](rows), len(self), x, indices, weights)


class Holding(nn.Module):
    """A container that has the list, a number for each expert, and a scale for all."""

    def __init__(self, experts: list[nn.Module]) -> None:
        super().__init__()
        self.num_experts, self.mlps = len(experts), nn.ModuleList(experts)
        self.each, self.scale = nn.Parameter(torch.rand(len(experts))), nn.Parameter(torch.rand(FEATURES))

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        weights = top_k_weights * self.each[top_k_index]
        return self.scale * mixed(
            lambda number, rows: self.mlps[number](rows), self.num_experts, hidden, top_k_index, weights
        )


class Parallel(nn.Module):
    """A container of lists of layers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(FEATURES, INNER) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(INNER, FEATURES) for _ in range(count))

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        experts = list(zip(self.up, self.down, strict=True))
        return mixed(lambda n, rows: experts[n][1](experts[n][0](rows).relu()), len(experts), x, indices, weights)


LISTED: dict[str, Callable[[], nn.Module]] = {
    "a list": lambda: Itself(Gated() for _ in range(6)),
    "a list within": lambda: Holding([stacked() for _ in range(4)]),
    "parallel lists": lambda: Parallel(4),
    "experts with norms": lambda: Itself(normed() for _ in range(4)),
}


class Mixture(nn.Module):
    """A router, and experts behind it."""

    def __init__(self, experts: nn.Module, count: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(FEATURES, count, bias=False), experts

    def forward(self, x: Tensor) -> Tensor:
        weights, indices = self.gate(x).softmax(-1).topk(2, -1)
        return self.experts(x.flatten(0, -2), indices.flatten(0, -2), weights.flatten(0, -2)).view_as(x)


class Block(nn.Module):
    """A layer of a transformer without attention."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        experts = LISTED[kind]()
        self.norm, self.moe = nn.LayerNorm(FEATURES), Mixture(experts, 6 if kind == "a list" else 4)
        self.fc1, self.fc2 = nn.Linear(FEATURES, INNER), nn.Linear(INNER, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.moe(self.norm(x))
        return x + self.fc2(F.gelu(self.fc1(x)))


class Listed(nn.Module):
    """A language model with two mixtures of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, FEATURES), nn.Linear(FEATURES, VOCABULARY)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))
