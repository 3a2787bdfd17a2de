"""A checkpoint's folder: complete or absent, and refused when a byte of it has changed.

The files are written aside, in ``NAME.incomplete``; then the manifest, with a checksum of every piece; then the
marker; then the folder gets its name. One of that name before is kept as ``NAME.replaced`` until then.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter, SavePlan
from torch.distributed.checkpoint import SavePlanner as AnySavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

MANIFEST, MARKER, STATE = "manifest.json", "complete", "state.pt"
_BUFFER = 8 * 2**20

# By file: (bytes, CRC-32, what is stored there) of the pieces that follow one another in it.
Sums = dict[str, list[tuple[int, int, str]]]


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; the message is one sentence, the same on all ranks."""


def aside(folder: Path) -> Path:
    """Where a checkpoint is while it is written."""
    return folder.with_name(f"{folder.name}.incomplete")


def _replaced(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.replaced")


class SummingWriter(FileSystemWriter):
    """torch's writer of files, which notes the checksum of every piece it wrote in `sums`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.sums: Sums = {}

    def write_data(self, plan: SavePlan, planner: AnySavePlanner) -> Future[list[WriteResult]]:  # noqa: D102
        written = super().write_data(plan, planner)
        for result in sorted(written.wait(), key=lambda result: result.storage_data.offset):
            place = result.storage_data
            sums = self.sums.setdefault(place.relative_path, [])
            assert place.offset == sum(length for length, *_ in sums)
            crc = _crc(Path(self.path, place.relative_path), place.offset, place.length)
            sums.append((place.length, crc, f"{result.index.fqn} at {tuple(result.index.offset or ())}"))
        return written


def _crc(file: Path, offset: int, length: int) -> int:
    crc = 0
    with file.open("rb") as stream:
        stream.seek(offset)
        while length > 0 and (part := stream.read(min(_BUFFER, length))):
            crc, length = zlib.crc32(part, crc), length - len(part)
    return crc


def flush(path: Path) -> None:
    """Make a file, or a folder's entries, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def begin(folder: Path) -> None:
    """An empty folder to write into."""
    shutil.rmtree(aside(folder), ignore_errors=True)
    aside(folder).mkdir(parents=True)


def commit(folder: Path, sums: Sums) -> None:
    """Turn what was written aside into the checkpoint.

    Args:
        folder: its final name.
        sums: of the files that ranks wrote; the others are summed here.
    """
    work = aside(folder)
    for file in work.iterdir():
        if file.name not in sums:
            sums[file.name] = [(file.stat().st_size, _crc(file, 0, file.stat().st_size), file.name)]
    _write(work / MANIFEST, json.dumps({"version": 1, "files": dict(sorted(sums.items()))}))
    _write(work / MARKER, hashlib.sha256((work / MANIFEST).read_bytes()).hexdigest())
    flush(work)
    if folder.exists():
        shutil.rmtree(_replaced(folder), ignore_errors=True)
        folder.rename(_replaced(folder))
    work.rename(folder)
    flush(folder.parent)
    shutil.rmtree(_replaced(folder), ignore_errors=True)


def _write(file: Path, text: str) -> None:
    file.write_text(text)
    flush(file)


def find(folder: Path) -> Path:
    """The complete checkpoint of this name: itself, or the one before where a save died as it took its place.

    Raises:
        CheckpointError: there is none.
    """
    for candidate in (folder, _replaced(folder)):
        if (candidate / MARKER).is_file():
            return candidate
    state = f"is not complete, for it has no file {MARKER}" if folder.is_dir() else "does not exist"
    raise CheckpointError(f"checkpoint {folder} {state}; name one that was saved to its end")


def latest(root: str | os.PathLike) -> Path | None:
    """The complete checkpoint in `root` that was finished last; None where there is none."""
    names = {Path(f"{marker.parent}".removesuffix(".replaced")) for marker in Path(root).glob(f"*/{MARKER}")}
    complete = [folder for folder in names if not folder.name.endswith(".incomplete")]
    return max(complete, key=lambda folder: (find(folder) / MARKER).stat().st_mtime_ns, default=None)


def drop_old(folder: Path, keep_last: int) -> None:
    """Delete the complete checkpoints beside `folder` but for the `keep_last` that were finished last.

    What is no complete checkpoint stays. A marker goes first, so that one half deleted is none.
    """
    markers = {marker.parent: marker.stat().st_mtime_ns for marker in folder.parent.glob(f"*/{MARKER}")}
    complete = [found for found in markers if not found.name.endswith((".incomplete", ".replaced"))]
    for old in sorted(complete, key=lambda found: (found == folder, markers[found]))[:-keep_last]:
        for gone in (_replaced(old), old):
            (gone / MARKER).unlink(missing_ok=True)
            shutil.rmtree(gone, ignore_errors=True)


def verify(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Read files and compare them with the manifest; ranks share the work.

    Args:
        folder: a complete checkpoint.
        part: which of the `parts` shares of the pieces is compared here.
        parts: how many there are.

    Raises:
        CheckpointError: names the file and the tensor that are not as they were written.
    """
    manifest = (folder / MANIFEST).read_bytes() if (folder / MANIFEST).is_file() else b""
    if hashlib.sha256(manifest).hexdigest() != (folder / MARKER).read_text(errors="replace"):
        raise _damaged(folder, f"{MANIFEST} or {MARKER}")
    for number, (name, offset, length, crc, what) in enumerate(_pieces(json.loads(manifest)["files"])):
        file = folder / name
        if number % parts == part and (not file.is_file() or _crc(file, offset, length) != crc):
            raise _damaged(folder, name if what == name else f"{name}, which holds {what}")


def _pieces(sums: dict[str, Any]) -> Iterator[tuple[str, int, int, int, str]]:
    for name, pieces in sums.items():
        offset = 0
        for length, crc, what in pieces:
            yield name, offset, length, crc, what
            offset += length


def _damaged(folder: Path, where: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {folder} is damaged in {where}; restore it, or load another one")
