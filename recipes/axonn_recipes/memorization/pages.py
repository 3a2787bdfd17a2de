"""The pages: windows of a text, or the beginnings of documents; which of them are in a bucket, and when each is trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from axonn_plugins.config import ConfigError
from axonn_recipes.data import load
from axonn_recipes.memorization.settings import BUCKETS, Settings

HELD_OUT = 64
"""Pages that are never trained on, of which the loss says how well the language is known."""
_WORDS, _LETTERS, _SEED = 600, "etaoinshrdlucmfwypvbgk", 1


@dataclass(frozen=True)
class Pages:
    """Token ids.

    Attributes:
        learned: (pages, tokens), from which buckets and fillers are drawn.
        held_out: (`HELD_OUT`, tokens).
        source: where they come from, in words.
    """

    learned: Tensor
    held_out: Tensor
    source: str

    @property
    def digest(self) -> str:
        """Names the content."""
        return hashlib.sha256(self.learned.numpy().tobytes() + self.held_out.numpy().tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class Order:
    """An order of pages that a seed draws.

    Attributes:
        buckets: indices of pages, by bucket.
        batches: indices of pages, (warm-up and further steps, batch).
    """

    buckets: dict[str, Tensor]
    batches: Tensor


def order(settings: Settings, pages: int, seed: int) -> Order:
    """Buckets at random, each page's repetitions spread evenly over the steps after the warm-up, fillers between them.

    Args:
        settings: how many of each.
        pages: that there are.
        seed: of what is random.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(pages, generator=generator)
    chosen = drawn[: len(BUCKETS) * settings.pages].chunk(len(BUCKETS))
    fillers = drawn[len(BUCKETS) * settings.pages :][: settings.fillers]
    first = settings.warmup * settings.batch
    kinds = [(fillers[first:], 1), *zip(chosen[1:], settings.epochs, strict=True)]
    index = torch.cat([pages.repeat(epochs) for pages, epochs in kinds])
    # The r-th of n readings of a page is in the r-th of n parts of the run.
    when = torch.cat([_moments(len(pages), epochs, generator) for pages, epochs in kinds])
    sequence = torch.cat([fillers[:first], index[when.argsort()]])
    return Order(dict(zip(BUCKETS, chosen, strict=True)), sequence.view(-1, settings.batch))


def _moments(pages: int, epochs: int, generator: torch.Generator) -> Tensor:
    reading = torch.arange(epochs, dtype=torch.float64).repeat_interleave(pages)
    return (reading + torch.rand(len(reading), generator=generator, dtype=torch.float64)) / epochs


def windows(path: Path | None, settings: Settings) -> Pages:
    """Windows of a text's bytes that do not overlap.

    Args:
        path: a text file or a folder; None for words that are made up.
        settings: how long and how many.

    Raises:
        ConfigError: nothing to read there, or too little.
    """
    width, needed = settings.tokens, len(BUCKETS) * settings.pages + settings.fillers
    if path is None:
        rows = _rows(made_up((needed + HELD_OUT) * width), width)
        return _checked(rows[:needed], rows[needed:], "words that are made up", settings)
    corpus = load(str(path), width)
    learned, held_out = (_rows(part.numpy().tobytes(), width) for part in (corpus.training, corpus.validation))
    return _checked(learned, held_out[:HELD_OUT], f"{corpus.files} files of {corpus.source}", settings)


def _rows(text: bytes, width: int) -> Tensor:
    count = len(text) // width
    return torch.from_numpy(np.frombuffer(text, np.uint8, count * width).reshape(count, width).astype(np.int64))


def _checked(learned: Tensor, held_out: Tensor, source: str, settings: Settings) -> Pages:
    needed = len(BUCKETS) * settings.pages + settings.fillers
    if len(learned) < needed or len(held_out) < HELD_OUT:
        raise ConfigError(
            f"--data: {source} make {len(learned)} pages of {settings.tokens} tokens and {len(held_out)} held out, and {needed} and "
            f"{HELD_OUT} are needed; give more text, or lower --pages, --steps or --batch"
        )
    return Pages(learned, held_out, source)


def made_up(size: int) -> bytes:
    """Sentences of made-up words, some of them much more common than others (Zipf's law), always the same.

    Args:
        size: bytes.
    """
    random = np.random.default_rng(_SEED)
    letters = np.array(list(_LETTERS))
    often = 1 / np.arange(2, len(letters) + 2)
    words = ["".join(random.choice(letters, random.integers(2, 9), p=often / often.sum())) for _ in range(_WORDS)]
    ranks = 1 / np.arange(1, _WORDS + 1)
    drawn = random.choice(_WORDS, size // 3 + 1, p=ranks / ranks.sum())
    ends = random.random(len(drawn)) < 0.1
    text = " ".join(words[word] + ("." if end else "") for word, end in zip(drawn, ends, strict=True))
    return text.encode()[:size]


def documents(folder: Path, tokenizer: Any, settings: Settings) -> Pages:
    """The first tokens of the documents of a folder that are long enough; it is read no further than needed.

    Args:
        folder: each file is a document, and each line of a .jsonl file, of which "text" counts.
        tokenizer: of transformers.
        settings: how long and how many.

    Raises:
        ConfigError: nothing to read there, or too little.
    """
    needed = len(BUCKETS) * settings.pages + settings.fillers + HELD_OUT
    rows: list[list[int]] = []
    for text in _texts(folder):
        ids = tokenizer(text, truncation=True, max_length=settings.tokens)["input_ids"]
        if len(ids) == settings.tokens:
            rows.append(ids)
        if len(rows) == needed:
            break
    found = torch.tensor(rows, dtype=torch.int64).view(-1, settings.tokens)
    return _checked(found[HELD_OUT:], found[:HELD_OUT], f"the long enough pages of {folder}", settings)


def _texts(folder: Path) -> Iterator[str]:
    if not folder.is_dir():
        raise ConfigError(f"--data {folder} is not a folder; give one with a page in each file, or .jsonl files")
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")):
        if file.suffix != ".jsonl":
            yield file.read_text(errors="replace")
            continue
        with file.open(errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    text = json.loads(line)["text"]
                except (ValueError, KeyError, TypeError):
                    text = None
                if not isinstance(text, str):
                    raise ConfigError(
                        f'--data {file}, line {number}: not an object with a "text"; write {{"text": "..."}}'
                    )
                yield text
