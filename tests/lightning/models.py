"""A small language model, and data in a known order."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

VOCABULARY, TOKENS, WIDTH = 37, 7, 24
SAMPLES, BATCH = 24, 4


class Language(nn.Module):
    """Tied embeddings; widths that nothing but the axes divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def reset_parameters(self) -> None:
        nn.init.ones_(self.unused)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(ids)
        logits = self.head(x + self.down(nn.functional.gelu(self.up(self.norm(x)))))
        # Inside, for Lightning's double precision makes what a model returns single.
        return logits if targets is None else loss_of(logits, targets)


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))


def groups(model: nn.Module) -> list[dict]:
    """Sorted by their shapes, as scripts do."""
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]


def loader(readers: int, samples: int = SAMPLES, seed: int = 3, shuffle: bool = False) -> DataLoader:
    """Batches of one reader, which with those of the others are BATCH samples."""
    data = torch.randint(VOCABULARY, (samples, TOKENS), generator=torch.Generator().manual_seed(seed))
    order = torch.Generator().manual_seed(5) if shuffle else None
    return DataLoader(data, batch_size=BATCH // readers, shuffle=shuffle, generator=order)
