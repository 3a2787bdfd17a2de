"""The task that is learned: the next byte of a text, or the next token of a tokenised one."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from axonn_plugins.config import ConfigError
from axonn_recipes.data import Corpus, load
from axonn_recipes.models.gpt import GPT, GPTConfig

TOKEN_FILES = ("train.bin", "val.bin")
_VALIDATION_SEED = 1_000_000_007
_MOST = math.log(sys.float_info.max)
"""The largest loss whose perplexity is a number."""


@dataclass(frozen=True)
class Tokens:
    """Token ids from `train.bin` and `val.bin`: unsigned 16-bit integers, one after another, as nanoGPT's scripts write them."""

    folder: Path

    def batch(self, part: str, size: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
        """Random windows; see `axonn_recipes.data.Corpus.batch`."""
        ids = np.memmap(self.folder / TOKEN_FILES[part == "validation"], dtype=np.uint16, mode="r")
        starts = torch.randint(len(ids) - context, (size,), generator=torch.Generator().manual_seed(seed)).numpy()
        windows = torch.from_numpy(ids[starts[:, None] + np.arange(context + 1)].astype(np.int64))
        return windows[:, :-1], windows[:, 1:]


def read(path: str | None, model: GPTConfig) -> Corpus | Tokens:
    """A text as bytes, or a folder of token ids.

    Args:
        path: a text file or folder; a folder with `train.bin` and `val.bin`; None for the source of Python's standard library.
        model: whose vocabulary and context it is to fit.

    Raises:
        ConfigError: it does not.
    """
    folder = Path(path) if path is not None else None
    if folder is not None and all((folder / name).is_file() for name in TOKEN_FILES):
        for name in TOKEN_FILES:
            size = (folder / name).stat().st_size
            if not size or size % 2:
                raise ConfigError(
                    f"--data {folder / name} has {size} bytes, which are no 16-bit ids; tokenise it again"
                )
            ids = np.memmap(folder / name, dtype=np.uint16, mode="r")
            if len(ids) <= model.context or int(ids.max()) >= model.vocabulary:
                raise ConfigError(
                    f"--data {folder / name} holds {len(ids)} ids up to {int(ids.max())}; more than {model.context} below "
                    f"{model.vocabulary} are needed: tokenise it for this vocabulary"
                )
        return Tokens(folder)
    return load(path, model.context)


@dataclass(frozen=True)
class Text:
    """Windows of a corpus, the same for the same step on any number of ranks.

    Attributes:
        corpus: to draw from.
        model: sizes.
        batch: windows a step, over all ranks.
        micro_batch: windows of a rank at a time.
        validation_batches: batches to validate with.
        seed: of the windows.
    """

    corpus: Corpus | Tokens
    model: GPTConfig
    batch: int
    micro_batch: int
    validation_batches: int
    seed: int

    metric = "perplexity"

    @property
    def title(self) -> str:  # noqa: D102
        m = self.model
        return f"GPT, {m.layers} blocks, hidden {m.hidden}, {m.heads} heads, context {m.context}"

    def build(self) -> nn.Module:  # noqa: D102
        return GPT(self.model)

    def _share(self, part: str, seed: int, rank: int, ranks: int) -> list[Tensor]:
        """A rank's share of a batch: windows, not shifted apart yet."""
        return [t.chunk(ranks)[rank] for t in self.corpus.batch(part, self.batch, self.model.context, seed)]

    def batches(self, step: int, rank: int, ranks: int) -> list[tuple[Tensor, Tensor]]:  # noqa: D102
        ids, targets = self._share("training", self.seed * _VALIDATION_SEED + step, rank, ranks)
        return list(zip(ids.split(self.micro_batch), targets.split(self.micro_batch), strict=True))

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:  # noqa: D102
        return model(inputs, targets)

    def held_out(self, rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:  # noqa: D102
        for number in range(self.validation_batches):
            ids, targets = self._share("validation", number, rank, ranks)
            yield from zip(ids.split(self.micro_batch), targets.split(self.micro_batch), strict=True)

    def score(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[float, int]:  # noqa: D102
        return model(inputs, targets).item() * targets.numel(), targets.numel()

    def figure(self, mean: float) -> float:  # noqa: D102
        return math.inf if mean > _MOST else math.exp(mean)
