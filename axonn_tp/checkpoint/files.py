"""A checkpoint's folder: complete or absent, and refused when a byte of it has changed.

The files are written aside, in ``NAME.incomplete``; then the manifest, with a checksum of every piece; then the
marker; then the folder gets its name. One of that name before is kept as ``NAME.replaced`` until then; what else was put into it stays.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from pickle import PickleError
from typing import TypeVar
from uuid import uuid4

from torch.distributed.checkpoint import FileSystemWriter, SavePlan
from torch.distributed.checkpoint import SavePlanner as AnySavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from axonn_tp.checkpoint import sums
from axonn_tp.checkpoint.sums import Sums, flush

MANIFEST, MARKER, STATE = "manifest.json", "complete", "state.pt"
WRITER = "writer"
_OWN = (MANIFEST, MARKER, STATE, ".metadata", "*.distcp", "random_*.pickle")


T = TypeVar("T")


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; the message is one sentence, the same on all ranks."""


def aside(folder: Path) -> Path:
    """Where a checkpoint is while it is written."""
    return folder.with_name(f"{folder.name}.incomplete")


def _replaced(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.replaced")


def saying(folder: Path, rank: int, work: Callable[[], T]) -> T:
    """The result of a part of a save.

    Args:
        folder: the checkpoint.
        rank: who does the work.
        work: the part.

    Raises:
        CheckpointError: it ended with an error, which is named.
    """
    try:
        return work()
    except CheckpointError:
        raise
    except Exception as error:
        pickled = isinstance(error, PickleError | TypeError | AttributeError)
        remedy = "; leave out of extra what cannot be pickled" if pickled else ""
        raise CheckpointError(f"checkpoint {folder} was not written, for rank {rank} had {error!r}{remedy}") from None


class SummingWriter(FileSystemWriter):
    """torch's writer of files, which notes the checksum of every piece it wrote in `sums`.

    Args:
        folder: where to.
        one_by_one: ask for a piece when the one before it is written; else, with a GPU, for several at once.
    """

    def __init__(self, folder: Path, one_by_one: bool = False) -> None:
        super().__init__(folder)
        if one_by_one:
            self.per_thread_copy_ahead = 0
        self.sums: Sums = {}

    def write_data(self, plan: SavePlan, planner: AnySavePlanner) -> Future[list[WriteResult]]:  # noqa: D102
        written = super().write_data(plan, planner)
        for result in sorted(written.wait(), key=lambda result: result.storage_data.offset):
            place = result.storage_data
            written_before = self.sums.setdefault(place.relative_path, [])
            assert place.offset == sum(length for length, *_ in written_before)
            crc = sums.crc(Path(self.path, place.relative_path), place.offset, place.length)
            what = f"{result.index.fqn} at {tuple(result.index.offset or ())}"
            written_before.append((place.length, crc, what))
        return written


def begin(folder: Path) -> str:
    """An empty folder to write into.

    Returns:
        By which `commit` knows that nobody else has begun to write it since.

    Raises:
        CheckpointError: the process runs in the checkpoint's folder, whose place it would take.
    """
    if Path.cwd().is_relative_to(folder.resolve()):
        raise CheckpointError(
            f"checkpoint {folder} would take the place of the folder that the process runs in; name a folder in it"
        )
    shutil.rmtree(aside(folder), ignore_errors=True)
    aside(folder).mkdir(parents=True)
    mark = uuid4().hex
    (aside(folder) / WRITER).write_text(mark)
    return mark


def commit(folder: Path, written: Sums, mark: str) -> None:
    """Turn what was written aside into the checkpoint.

    Args:
        folder: its final name.
        written: checksums of the files that ranks wrote; those of the others are found here.
        mark: what `begin` returned.

    Raises:
        CheckpointError: another process writes the same folder, or another rank wrote its files elsewhere.
    """
    work = aside(folder)
    check_writer(folder, mark)
    for name, pieces in written.items():
        file = work / name
        if not file.is_file() or file.stat().st_size != sum(length for length, *_ in pieces):
            raise CheckpointError(
                f"checkpoint {folder} was not written, for the file {name} of another rank is not there; give all ranks the same folder, on a "
                "disk that they all see"
            )
    others = sums.cut(work, [file.name for file in work.iterdir() if file.name not in {*written, WRITER}])
    sums.seal(work, written | sums.sums_of(others, sums.checksums(work, others)), MANIFEST, MARKER)
    (work / WRITER).unlink()
    flush(work)
    take_place(work, folder, _replaced(folder), _OWN)


def check_writer(folder: Path, mark: str) -> None:
    """Refuse to go on with what another process has begun to write since.

    Args:
        folder: the checkpoint.
        mark: what `begin` returned.

    Raises:
        CheckpointError: there is one.
    """
    writer = aside(folder) / WRITER
    if not writer.is_file() or writer.read_text() != mark:
        raise CheckpointError(
            f"checkpoint {folder} was not written, for another process has begun to write it, too; give each run a folder of its own, and have all ranks "
            "of a run save with their mesh, or rank 0 alone"
        )


def abandon(folder: Path, mark: str) -> None:
    """Give up what was begun, whose place a full disk needs.

    Args:
        folder: the checkpoint.
        mark: what `begin` returned; what others have begun since stays.
    """
    writer = aside(folder) / WRITER
    if writer.is_file() and writer.read_text() == mark:
        shutil.rmtree(aside(folder), ignore_errors=True)


def take_place(work: Path, folder: Path, replaced: Path, own: Sequence[str]) -> None:
    """Give a folder that is complete its name; of one of that name before, what is no checkpoint's stays in it.

    Args:
        work: the folder.
        folder: its final name.
        replaced: the name of the one before until then.
        own: patterns of a checkpoint's files.
    """
    if os.path.lexists(folder):
        _carry(replaced, folder, own)  # what a save that was killed has left there
        _remove(replaced)
        folder.rename(replaced)
    work.rename(folder)
    _carry(replaced, folder, own)
    flush(folder.parent)
    _remove(replaced)


def _carry(old: Path, new: Path, own: Sequence[str]) -> None:
    """Move what others have put into a checkpoint's folder; what a link leads to stays where it is."""
    if old.is_dir() and new.is_dir() and not old.is_symlink():
        for entry in old.iterdir():
            if not any(fnmatch(entry.name, pattern) for pattern in own) and not os.path.lexists(new / entry.name):
                entry.rename(new / entry.name)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _complete(root: Path) -> Iterator[Path]:
    """Folders in `root` that are complete checkpoints, under whatever name."""
    return (marker.parent for marker in root.glob(f"*/{MARKER}") if (marker.parent / MANIFEST).is_file())


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
    names = {Path(f"{folder}".removesuffix(".replaced")) for folder in _complete(Path(root))}
    complete = [folder for folder in names if not folder.name.endswith(".incomplete")]
    return max(complete, key=lambda folder: (find(folder) / MARKER).stat().st_mtime_ns, default=None)


def drop_old(folder: Path, keep_last: int) -> None:
    """Delete the complete checkpoints beside `folder` but for the `keep_last` that were finished last.

    What is no complete checkpoint stays. A marker goes first, so that one half deleted is none.
    """
    # A link to one of them is no other checkpoint.
    own = (found for found in _complete(folder.parent) if not found.is_symlink())
    markers = {found: (found / MARKER).stat().st_mtime_ns for found in own}
    complete = [found for found in markers if not found.name.endswith((".incomplete", ".replaced"))]
    for old in sorted(complete, key=lambda found: (found == folder, markers[found]))[:-keep_last]:
        for gone in (_replaced(old), old):
            (gone / MARKER).unlink(missing_ok=True)
            shutil.rmtree(gone, ignore_errors=True)


def damage(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Parts of a complete checkpoint that are not as they were written; see `sums.damage`."""
    return sums.damage(folder, MANIFEST, MARKER, part, parts)
