"""Labelled images: handwritten digits that come with scikit-learn, or CIFAR-10 and CIFAR-100 as their authors publish them."""

from __future__ import annotations

import gzip
import importlib.util
import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from axonn_plugins.config import ConfigError

_DIGITS = "datasets/data/digits.csv.gz"
_CIFAR = {
    "CIFAR-10": ([f"data_batch_{n}" for n in range(1, 6)], ["test_batch"]),
    "CIFAR-100": (["train"], ["test"]),
}
_LABEL_BYTES = {"CIFAR-10": 1, "CIFAR-100": 2}
_PIXELS = 3 * 32 * 32
_PLAIN = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


@dataclass(frozen=True)
class Images:
    """Images to learn from and held out: (number, channels, height, width), mean 0 and deviation 1, and their classes.

    Attributes:
        source: in words.
        classes: how many.
    """

    source: str
    classes: int
    training: Tensor
    training_labels: Tensor
    validation: Tensor
    validation_labels: Tensor


def read(path: str | None) -> Images:
    """Images with sides of 32 pixels.

    Args:
        path: a folder with CIFAR-10's or CIFAR-100's files, the Python or the binary version; None for the digits.

    Raises:
        ConfigError: they are not there.
    """
    return _digits() if path is None else _cifar(Path(path))


def digits_file() -> Path:
    """Where scikit-learn keeps its digits; it need not be imported, nor what it depends on.

    Raises:
        ConfigError: it is not installed.
    """
    found = importlib.util.find_spec("sklearn")
    file = Path(found.origin).parent / _DIGITS if found is not None and found.origin else None
    if file is None or not file.is_file():
        raise ConfigError(
            "the handwritten digits come with scikit-learn, which is not installed; pip install --no-deps scikit-learn, or give "
            "--data a folder with CIFAR-10"
        )
    return file


def _digits() -> Images:
    """1,797 digits of 8 x 8 pixels, each pixel repeated to 32 x 32; a fifth is held out."""
    with gzip.open(digits_file(), "rt") as lines:
        rows = torch.from_numpy(np.loadtxt(lines, delimiter=","))
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    images = rows[:, :-1].float().view(-1, 1, 8, 8).repeat_interleave(4, 2).repeat_interleave(4, 3)
    held_out = len(rows) // 5
    return _normalised(
        "scikit-learn's handwritten digits",
        10,
        images[held_out:],
        rows[held_out:, -1],
        images[:held_out],
        rows[:held_out, -1],
    )


def _cifar(folder: Path) -> Images:
    for name, parts in _CIFAR.items():
        for suffix, parse in (("", _pickled), (".bin", _binary)):
            if all((folder / f"{file}{suffix}").is_file() for files in parts for file in files):
                (training, labels), (validation, held_out) = (
                    tuple(
                        torch.cat(tensors)
                        for tensors in zip(*(parse(folder / f"{f}{suffix}", name) for f in files), strict=True)
                    )
                    for files in parts
                )
                return _normalised(name, 10 if name == "CIFAR-10" else 100, training, labels, validation, held_out)
    raise ConfigError(
        f"--data {folder} holds neither CIFAR-10 (data_batch_1 to 5 and test_batch) nor CIFAR-100 (train and test), with or "
        "without .bin; give the folder that their archive unpacks to"
    )


class _Plain(pickle.Unpickler):
    """Reads arrays and plain containers, and nothing that could run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PLAIN:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of CIFAR")
        return super().find_class(module, name)


def _pickled(file: Path, name: str) -> tuple[Tensor, Tensor]:
    try:
        content = _Plain(io.BytesIO(file.read_bytes()), encoding="bytes").load()
        labels = content[b"labels" if name == "CIFAR-10" else b"fine_labels"]
        return torch.from_numpy(np.array(content[b"data"])).view(-1, 3, 32, 32), torch.tensor(labels)
    except (pickle.UnpicklingError, KeyError, TypeError, EOFError, RuntimeError) as error:
        raise ConfigError(f"--data: {file} is not a file of {name} ({error}); unpack the archive anew") from None


def _binary(file: Path, name: str) -> tuple[Tensor, Tensor]:
    raw, row = np.fromfile(file, dtype=np.uint8), _LABEL_BYTES[name] + _PIXELS
    if not len(raw) or len(raw) % row:
        raise ConfigError(f"--data: {file} has {len(raw)} bytes, not a multiple of the {row} of an image of {name}")
    rows = torch.from_numpy(raw).view(-1, row)
    return rows[:, -_PIXELS:].reshape(-1, 3, 32, 32), rows[:, -_PIXELS - 1].long()


def _normalised(
    source: str, classes: int, training: Tensor, labels: Tensor, validation: Tensor, held_out: Tensor
) -> Images:
    training, validation = training.float(), validation.float()
    mean, deviation = training.mean((0, 2, 3), keepdim=True), training.std((0, 2, 3), keepdim=True)
    return Images(
        source, classes, (training - mean) / deviation, labels.long(), (validation - mean) / deviation, held_out.long()
    )
