"""The work of one of many ranks before its first step: mesh, plan, split, engine; and the ledger of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

import axonn_tp
from axonn_plugins.observe.ledger import Ledger
from axonn_recipes.bench_scale.standin import grid_of
from axonn_tp import Grid, Mesh

WIDTH, HEADS, LAYERS, VOCABULARY, TOKENS = 512, 64, 2, 2048, 32


class Block(nn.Module):
    """Llama's: attention and a gated feed-forward layer, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """The stream behind the block."""
        read = self.first(stream)
        q, k, v = (
            layer(read).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        stream = stream + self.o(seen.transpose(1, 2).flatten(2))
        read = self.second(stream)
        return stream + self.down(nn.functional.silu(self.gate(read)) * self.up(read))


class Llama(nn.Module):
    """A small one, built on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """The logits."""
        stream = self.embedding(words)
        for block in self.blocks:
            stream = block(stream)
        return self.head(self.norm(stream))


PLAN = {
    "embedding": "embedding",
    **{f"*.{name}": axonn_tp.LayerPlan("normal", heads=HEADS) for name in "qkv"},
    **{f"*.{name}": "normal" for name in ("gate", "up")},
    **{f"*.{name}": "transposed" for name in ("o", "down")},
    **{f"*.{name}": "norm" for name in ("first", "second")},
    "norm": "norm",
    "head": "head",
}


def llama() -> Llama:
    """The model, without memory."""
    with torch.device("meta"):
        return Llama()


@dataclass
class Start:
    """The things that one rank has made so far; a part that is measured makes it anew.

    Attributes:
        ranks: of the job.
        rank: this one.
    """

    ranks: int
    rank: int
    made: list[Mesh] = field(default_factory=list)

    @property
    def grid(self) -> Grid:
        """The grid of all ranks."""
        return grid_of(self.ranks)

    def make_mesh(self) -> Mesh:
        """A mesh of its own groups."""
        self.made.append(Mesh(self.grid, "cpu"))
        return self.made[-1]

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of what follows."""
        return self.make_mesh()

    def split(self) -> nn.Module:
        """A model of this rank's shards."""
        return axonn_tp.parallelize(llama(), self.mesh, PLAN)

    @cached_property
    def model(self) -> nn.Module:
        """The model of what follows."""
        return self.split()

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW with its states."""
        found = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        found.step()
        return found

    def ledger(self) -> Ledger:
        """The ledger of a forward and a backward pass."""
        words = torch.zeros(1, TOKENS, dtype=torch.long)
        with Ledger(self.mesh.axis_names()) as book:
            self.model(words).sum().backward()
        book.by_axis()
        return book


def plan(start: Start) -> object:
    """The automatic plan of the model on the grid."""
    return axonn_tp.auto_plan(llama(), start.grid, torch.zeros(1, TOKENS, dtype=torch.long))


def plain_engine(start: Start) -> object:
    """The host for plain PyTorch, from a model to an engine that can step."""
    from axonn_plugins.hosts.plain import compose

    grid, layers = start.grid, {name: _as_json(kind) for name, kind in PLAN.items()}
    block = {"tensor_parallel": {"gx": grid.gx, "gy": grid.gy, "gz": grid.gz, "plan": layers}}
    return compose(llama(), lambda groups: torch.optim.AdamW(groups, lr=1e-3), block, stage=1)


def _as_json(kind: Any) -> Any:
    return kind if isinstance(kind, str) else {"kind": kind.kind, "heads": kind.heads}


Part = Callable[[Start], object]
