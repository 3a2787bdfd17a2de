"""The tensors of a safetensors file or folder, or of a checkpoint, as lazy tensors: nothing is read but names and shapes.

::

    with torch.device("meta"):
        model = Model()
    model.load_state_dict(lazy_tensors("folder"), assign=True)
    parallelize(model, mesh, plan)
"""

from __future__ import annotations

import json
import os
import pickle
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from axonn_tp.checkpoint.files import MANIFEST, MARKER, CheckpointError
from axonn_tp.checkpoint.planner import Place, Shard
from axonn_tp.checkpoint.ranks import Ranks
from axonn_tp.checkpoint.serial import DTYPES
from axonn_tp.checkpoint.training import Reading, read_shards
from axonn_tp.grid.layout import Layout
from axonn_tp.grid.lazy import Cut, LazyTensor, Source
from axonn_tp.grid.regions import Region

_wanted = 0


@contextmanager
def lazy_loading() -> Iterator[None]:
    """Inside, ``from_pretrained`` of HF transformers leaves the weights of a safetensors folder in their files."""
    global _wanted
    _wanted += 1
    try:
        yield
    finally:
        _wanted -= 1


def wanted() -> bool:
    """True within `lazy_loading`."""
    return _wanted > 0


def lazy_tensors(path: str | os.PathLike) -> dict[str, LazyTensor]:
    """Tensors by name; every rank that reads them sees the same files.

    Args:
        path: a safetensors file; a folder of them, with or without an index; or a checkpoint that `save` wrote.

    Raises:
        CheckpointError: it is none of these, a file is missing or cannot be read, or holds what torch has not.
    """
    path = Path(path)
    if (path / MARKER).is_file():
        return _of_checkpoint(path)
    return of_files(safetensors_files(path))


def safetensors_files(path: Path) -> list[Path]:
    """The files of a safetensors folder, or the one file.

    Raises:
        CheckpointError: there is none, or one that the index names is missing.
    """
    if path.is_file():
        return [path]
    single = path / "model.safetensors"
    if single.is_file():  # as transformers, which leaves an earlier save's index beside it
        return [single]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (ValueError, LookupError, AttributeError, TypeError):
            raise CheckpointError(f"{index} is not an index of safetensors files; restore it") from None
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"{file}, which {index.name} names, is missing; restore it")
        return files
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} has no safetensors file; name a folder that has, or the file")
    return files


def of_files(files: list[Path]) -> dict[str, LazyTensor]:
    """Tensors of files by name: safetensors, or what torch has saved.

    Raises:
        CheckpointError: one cannot be read, or holds what torch has not.
    """
    return {
        name: tensor
        for file in files
        for name, tensor in (_mapped(file) if file.suffix == ".bin" else SafeFile(file).tensors())
    }


def _mapped(file: Path) -> Iterator[tuple[str, LazyTensor]]:
    """Each tensor of a file that torch has saved, with its name."""
    try:
        held: dict[str, Tensor] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{file} cannot be read as torch's: {' '.join(str(error).split())}") from None
    for name, tensor in held.items():
        origin = f"{name} in {file.name} of {file.stat().st_size} bytes, {tuple(tensor.shape)}"
        yield name, LazyTensor(tensor.detach().to("meta"), Source(partial(_copied, tensor.detach()), origin))


def _copied(tensor: Tensor, cut: Cut | None) -> Tensor:
    return (tensor if cut is None else tensor[cut]).clone()


class SafeFile:
    """A safetensors file.

    Args:
        file: its name.

    Raises:
        CheckpointError: it cannot be read.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            # Not mapped: pages of a file count as a process's memory.
            self._opened: Any = safe_open(file, framework="pt", backend="pread")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from None

    def tensors(self) -> Iterator[tuple[str, LazyTensor]]:
        """Each with its name.

        Raises:
            CheckpointError: one is of a type that torch has not.
        """
        stamp = f"{self.file.name} of {self.file.stat().st_size} bytes"
        for name in self._opened.keys():
            stored = self._opened.get_slice(name)
            if stored.get_dtype() not in DTYPES:
                raise CheckpointError(f"{name} in {self.file} is {stored.get_dtype()}, which is not read here")
            like = torch.empty(stored.get_shape(), dtype=DTYPES[stored.get_dtype()], device="meta")
            origin = f"{name} in {stamp}, {tuple(like.shape)}"
            yield name, LazyTensor(like, Source(_Named(self, name), origin))

    def read(self, name: str, cut: Cut | None) -> Tensor:
        """A tensor, or a rectangle of it."""
        return self._opened.get_slice(name)[cut] if cut else self._opened.get_tensor(name)


@dataclass(frozen=True)
class _Named:
    file: SafeFile
    name: str

    def __call__(self, cut: Cut | None) -> Tensor:
        return self.file.read(self.name, cut)


@dataclass(frozen=True)
class _Rectangle(Shard):
    """A rectangle of a serial tensor, in the place of a rank's part."""

    offsets: tuple[int, ...] = ()

    def regions(self, place: Place) -> list[Region]:
        """The place itself: its tensor is not cut further."""
        return [Region(0, self.tensor.stride(), self.offsets, tuple(self.tensor.shape))]


def of_pieces(reader: FileSystemReader, metadata: Metadata, name: str, shape: torch.Size, stamp: str) -> LazyTensor:
    """A tensor in files of torch.distributed.checkpoint.

    Args:
        reader: of their folder.
        metadata: what the folder says of them.
        name: the tensor's there.
        shape: its shape.
        stamp: what tells the folder from others.
    """
    stored = metadata.state_dict_metadata[name]
    assert isinstance(stored, TensorStorageMetadata)
    dtype = stored.properties.dtype

    def read(cut: Cut | None) -> Tensor:
        cut = cut if cut is not None else tuple(slice(0, size) for size in shape)
        tensor = torch.empty([one.stop - one.start for one in cut], dtype=dtype)
        rectangle = _Rectangle(tensor, Layout(tuple(shape)), offsets=tuple(one.start for one in cut))
        read_shards(reader, metadata, {name: rectangle}, Place())
        return tensor

    return LazyTensor(torch.empty(shape, dtype=dtype, device="meta"), Source(read, f"{name} in {stamp}"))


def _of_checkpoint(folder: Path) -> dict[str, LazyTensor]:
    reading = Reading(folder, Ranks(None))
    reader = FileSystemReader(reading.folder)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    stamp = f"{folder.name}, {zlib.crc32((reading.folder / MANIFEST).read_bytes()):08x}"
    kinds = {name: kind for name, kind in reading.notes["tensors"].items() if name.startswith("model.")}
    found = {name.removeprefix("model."): _of_kind(reader, metadata, name, kinds[name], stamp) for name in kinds}
    return found | {name: found[known] for name, known in reading.notes["model"]["aliases"].items()}


def _of_kind(
    reader: FileSystemReader, metadata: Metadata, name: str, kind: tuple[tuple[int, ...], torch.dtype], stamp: str
) -> LazyTensor:
    shape, dtype = torch.Size(kind[0]), kind[1]
    if shape.numel():
        return of_pieces(reader, metadata, name, shape, stamp)
    # torch notes nothing of tensors without elements.
    empty = torch.empty(shape, dtype=dtype)
    return LazyTensor(empty.to("meta"), Source(lambda cut: empty, f"{name} in {stamp}"))
