"""One plain safetensors file of the serial model: written from any grid or checkpoint, read on any grid.

The file is written tensor by tensor, so that no process holds the model: an 8-byte length, a header in JSON, then the
tensors' bytes (the format is safetensors'; its library reads them, but writes only what is in memory as a whole).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from axonn_tp.checkpoint.dealt import DealtNames
from axonn_tp.checkpoint.files import CheckpointError
from axonn_tp.checkpoint.planner import Place, Shard
from axonn_tp.checkpoint.ranks import Ranks
from axonn_tp.checkpoint.state import Shards, model_state, restore_modules
from axonn_tp.checkpoint.sums import flush
from axonn_tp.checkpoint.training import Reading
from axonn_tp.checkpoint.whole import whole_tensors
from axonn_tp.grid.layout import Layout
from axonn_tp.grid.lazy import whole
from axonn_tp.grid.mesh import Mesh

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
"""Names that safetensors has for torch's types."""
_PIECE = 2**24
"""Elements that are compared at a time."""
Kind = tuple[tuple[int, ...], torch.dtype]


def export_safetensors(
    model: nn.Module, mesh: Mesh | None, file: str | os.PathLike, dtype: torch.dtype | None = None
) -> None:
    """Write the serial model's state dict; every rank of the mesh calls it, and rank 0 writes.

    Args:
        model: a model that `parallelize` split, or a serial one.
        mesh: its mesh; None for a serial model.
        file: the file; complete or absent.
        dtype: of the floating-point tensors; theirs when None.

    Raises:
        CheckpointError: a tensor's dtype has no name in safetensors, or the file cannot be written; the same on every rank.
    """
    ranks = Ranks(mesh)

    def kinds() -> dict[str, Kind]:
        (shards, notes), names, found = model_state(model), DealtNames(model), dict[str, Kind]()
        plain = {name.removeprefix("model."): shard for name, shard in shards.items()}
        for name, known in ({name: name for name in plain} | notes["aliases"]).items():
            layout, kind = plain[known].layout, plain[known].tensor.dtype
            for home in range(layout.homes(layout.grid or ranks.place.grid)):
                found[names.outward(name, home)] = _kind(layout.serial_shape, kind, dtype)
        return found

    header = ranks.together(lambda: _header(kinds()))
    # Extra states of modules, of which some are tensors, are no weights.
    tensors = ((name, tensor) for name, tensor in whole_tensors(model, mesh, dtype) if name in header)
    problem = None
    if ranks.rank == 0:
        try:
            _write(Path(file), header, tensors)
        except OSError as error:
            problem = CheckpointError(f"{file} cannot be written: {error.strerror or error}; give another place")
    for _ in tensors:  # which all ranks gather
        pass

    def told() -> None:
        if problem is not None:
            raise problem

    ranks.together(told)


def convert_checkpoint(folder: str | os.PathLike, file: str | os.PathLike, dtype: torch.dtype | None = None) -> None:
    """Write the model of a checkpoint as one safetensors file, in one process, a tensor at a time.

    Args:
        folder: what `save` wrote, on any grid.
        file: the file; complete or absent.
        dtype: of the floating-point tensors; theirs when None.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or a tensor's dtype has no name in safetensors.
    """
    reading = Reading(Path(folder), Ranks(None))
    stored = {name: kind for name, kind in reading.notes["tensors"].items() if name.startswith("model.")}
    source = {name.removeprefix("model."): name for name in stored}
    source |= {name: f"model.{known}" for name, known in reading.notes["model"]["aliases"].items()}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, full in source.items():
            shape, kind = stored[full]
            tensor = torch.empty(shape, dtype=kind)
            reading.read({full: Shard(tensor, Layout(shape))}, Place())
            yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    kinds = {name: _kind(stored[full][0], stored[full][1], dtype) for name, full in source.items()}
    _write(Path(file), _header(kinds), tensors())


def write_safetensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, of which lazy ones are read one at a time.

    Raises:
        CheckpointError: a tensor's dtype has no name in safetensors.
    """
    header = _header({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()})
    _write(file, header, ((name, whole(tensor)) for name, tensor in tensors.items()))


def _kind(shape: tuple[int, ...], own: torch.dtype, dtype: torch.dtype | None) -> Kind:
    return tuple(shape), dtype if dtype is not None and own.is_floating_point else own


def _header(kinds: dict[str, Kind]) -> dict[str, dict]:
    header, offset = {}, 0
    for name, (shape, dtype) in kinds.items():
        if dtype not in _NAMES:
            raise CheckpointError(f"{name} is {dtype}, which safetensors has no name for; export with another dtype")
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    return header


def _write(file: Path, header: dict[str, dict], tensors: Iterable[tuple[str, Tensor]]) -> None:
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f"{file.name}.incomplete")
    try:
        with aside.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            start = stream.tell()
            for name, tensor in tensors:
                stream.seek(start + header[name]["data_offsets"][0])
                _put(stream, tensor)
        flush(aside)
        aside.rename(file)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    flush(file.parent)


def _put(stream: BinaryIO, tensor: Tensor) -> None:
    stream.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _equal(stored: Any, one: str, other: str) -> bool:
    """True if two tensors of a file are the same; a piece is read at a time."""
    slices = [stored.get_slice(name) for name in (one, other)]
    shape = slices[0].get_shape()
    if shape != slices[1].get_shape():
        return False
    if not shape:
        return torch.equal(stored.get_tensor(one), stored.get_tensor(other))
    rows = max(_PIECE // max(torch.Size(shape[1:]).numel(), 1), 1)
    cuts = (slice(row, row + rows) for row in range(0, shape[0], rows))
    return all(torch.equal(*(part[cut] for part in slices)) for cut in cuts)


def import_safetensors(model: nn.Module, mesh: Mesh | None, file: str | os.PathLike) -> None:
    """Read a serial model's weights into a model on any grid; every rank of the mesh calls it and reads its own part.

    Weights of another dtype are converted. A parameter that layers share may be in the file under one of its names, or under all alike.

    Args:
        model: a model that `parallelize` split, or a serial one.
        mesh: its mesh; None for a serial model.
        file: a safetensors file of the serial model's state dict.

    Raises:
        CheckpointError: names the tensor that is missing, unknown, or of another shape; the same on every rank.
    """
    ranks = Ranks(mesh)
    (held, notes), names = model_state(model), DealtNames(model)
    shards = {names.outward(name.removeprefix("model.")): shard for name, shard in held.items()}
    aliases = {names.outward(name): names.outward(known) for name, known in notes["aliases"].items()}
    everyones = set().union(*ranks.gather({*shards, *aliases})) if names else {*shards, *aliases}
    ranks.together(lambda: _import(shards, aliases, everyones, ranks.place, Path(file)))
    restore_modules(model, {"modules": {}}, held)


@torch.no_grad()
def _import(shards: Shards, aliases: dict[str, str], everyones: set[str], place: Place, file: Path) -> None:
    try:
        opened = safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from None
    with opened as stored:
        names = set(stored.keys())
        source = {known: other for other, known in aliases.items() if other in names}
        source |= {name: name for name in shards if name in names}
        for name, shard in shards.items():
            if name not in source:
                raise CheckpointError(f"{file} has no {name}; import it into the model that it is of")
            shape = tuple(stored.get_slice(source[name]).get_shape())
            if shape != shard.layout.serial_shape:
                raise CheckpointError(
                    f"{name} has shape {shape} in {file} and {shard.layout.serial_shape} here; import it into the model that it is of"
                )
        for name in names - everyones:
            raise CheckpointError(f"{file} has {name}, which the model has not; import it into the model that it is of")
        for other, known in aliases.items():
            if {other, known} <= names and not _equal(stored, other, known):
                raise CheckpointError(
                    f"{known} and {other} differ in {file}, and the model has one weight for both; import it into a model that does not tie them"
                )
        for name, shard in shards.items():
            # A tensor without dims cannot be sliced.
            whole = stored.get_slice(source[name]) if shard.layout.serial_shape else stored.get_tensor(source[name])
            shard.fill(whole, place)
