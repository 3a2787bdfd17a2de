"""Text as Megatron's indexed datasets: PREFIX_training and PREFIX_validation, each a .bin and an .idx."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import (
    DType,
    IndexedDataset,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)
from torch import Tensor

from axonn_recipes.data import Corpus

PARTS = ("training", "validation")
_DOCUMENT = 2**16


def prepare(corpus: Corpus, prefix: Path, vocabulary: int) -> list[Path]:
    """Write a corpus, byte by byte, in documents of 64 KiB.

    Args:
        corpus: the text.
        prefix: start of the files' names.
        vocabulary: decides the type of a token.

    Returns:
        The files: for each part a .bin and an .idx.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for part in PARTS:
        name = f"{prefix}_{part}"
        builder = IndexedDatasetBuilder(get_bin_path(name), dtype=DType.optimal_dtype(vocabulary))
        for document in getattr(corpus, part).split(_DOCUMENT):
            builder.add_document(document.numpy(), [len(document)])
        builder.finalize(get_idx_path(name))
        written += [Path(get_bin_path(name)), Path(get_idx_path(name))]
    return written


def read(prefix: Path) -> Corpus:
    """Read a corpus that `prepare` wrote."""
    training, validation = (_tokens(IndexedDataset(f"{prefix}_{part}")) for part in PARTS)
    return Corpus(training, validation, 1, str(prefix))


def _tokens(dataset: IndexedDataset) -> Tensor:
    return torch.from_numpy(np.concatenate([dataset[number] for number in range(len(dataset))]).astype(np.int64))
