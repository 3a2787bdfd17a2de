"""The common part of all sides: one batch and one learning rate."""

from __future__ import annotations

import torch
from torch import Tensor

from axonn_recipes.bench_all.settings import Settings

LEARNING_RATE = 1e-3


def batch_of(settings: Settings, readers: int, reader: int, microbatches: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of a reader's microbatches, each (samples, context)."""
    generator = torch.Generator().manual_seed(settings.seed)
    whole = torch.randint(256, (settings.batch, settings.context + 1), generator=generator)
    mine = whole.chunk(readers)[reader].chunk(microbatches)
    return [(windows[:, :-1], windows[:, 1:]) for windows in mine]
