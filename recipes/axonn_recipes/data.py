"""Bytes to train on: the Python standard library's source, or any text file or folder."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from axonn_plugins.config import ConfigError

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"}
_HELD_OUT_SHARE = 20


@dataclass(frozen=True)
class Corpus:
    """Bytes of text, those to learn from and those held out, and a digest that tells corpora apart."""

    training: Tensor
    validation: Tensor
    files: int
    source: str

    @property
    def digest(self) -> str:
        """Names the content."""
        return hashlib.sha256(self.training.numpy().tobytes() + self.validation.numpy().tobytes()).hexdigest()[:16]

    def batch(self, part: str, size: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
        """Random windows of text, the same for the same seed on every machine and rank.

        Args:
            part: ``"training"`` or ``"validation"``.
            size: windows.
            context: bytes a window.
            seed: chooses them.

        Returns:
            ids and targets, both (size, context), int64; a target is the byte that follows.
        """
        text = self.training if part == "training" else self.validation
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(text) - context, (size,), generator=generator)
        windows = text[starts[:, None] + torch.arange(context + 1)].long()
        return windows[:, :-1], windows[:, 1:]


def load(path: str | None, context: int) -> Corpus:
    """Read a corpus; the list of files and what is held out depend on nothing but their names and contents.

    Args:
        path: a text file or a folder; None for the source of Python's standard library.
        context: bytes that a window needs.

    Raises:
        ConfigError: nothing to read there, or too little.
    """
    root = Path(path) if path is not None else Path(sysconfig.get_paths()["stdlib"])
    if not root.exists():
        raise ConfigError(f"--data {root} does not exist; give a text file or a folder")
    files = [root] if root.is_file() else _files(root, ".py" if path is None else "")
    training: list[bytes] = []
    validation: list[bytes] = []
    for file in files:
        name = file.relative_to(root).as_posix()
        held_out = hashlib.sha256(name.encode()).digest()[0] % _HELD_OUT_SHARE == 0
        (validation if held_out and len(files) > 1 else training).append(_read(file))
    if not validation:
        text = b"".join(training)
        cut = len(text) - max(len(text) // _HELD_OUT_SHARE, context + 1)
        training, validation = [text[: max(cut, 0)]], [text[max(cut, 0) :]]
    corpus = Corpus(
        _tensor(training), _tensor(validation), len(files), "Python's standard library" if path is None else str(root)
    )
    for what, part in (("training", corpus.training), ("validation", corpus.validation)):
        if len(part) <= context:
            raise ConfigError(
                f"--data {root} leaves {len(part)} bytes for {what}, fewer than a window of {context + 1}; give more text"
            )
    return corpus


def _files(root: Path, suffix: str) -> list[Path]:
    found = []
    for folder, inside, names in os.walk(root):
        inside[:] = filter(_is_text, inside)  # the rest, such as site-packages, is not walked
        found += [Path(folder, name) for name in names if name.endswith(suffix) and _is_text(name)]
    found = [file for file in found if file.is_file()]
    if not found:
        raise ConfigError(f"--data {root} holds no files; give a text file or a folder with some")
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _is_text(name: str) -> bool:
    return name not in _LEFT_OUT and not name.startswith(".")


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"--data {file} cannot be read: {error.strerror}; make it readable or leave it out") from None


def _tensor(pieces: list[bytes]) -> Tensor:
    return torch.from_numpy(np.frombuffer(b"\n".join(pieces), dtype=np.uint8).copy())
