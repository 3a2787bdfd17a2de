"""Checkpoints that are complete or absent: written aside, summed, renamed; the name in ``latest`` changes last.

Every rank reads a share of the bytes, when they have been written and before they are loaded, and fails where another does.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.common.portable import portable_in
from axonn_tp.checkpoint import files, sums

MANIFEST, MARKER = "axonn_manifest.json", "axonn_complete"
_LATEST, _IS_LATEST = "latest", "axonn_latest"
_ASIDE, _REPLACED = ".incomplete", ".replaced"
_OWN = ("axonn", "axonn_*", "*_states.pt", "zero")
T = TypeVar("T")


def everyone(work: Callable[[], T]) -> list[T]:
    """Do the work on each rank and gather the results; where it fails on one it fails on all, so that none waits for another.

    Args:
        work: communicates nothing.

    Raises:
        ConfigError: the first rank's failure.
    """
    problem, result = None, None
    try:
        result = work()
    except Exception as error:
        problem = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.filename is not None:
            problem = f'"{error.filename}" cannot be used: {error.strerror}; give another, or make room for it'
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (problem, result))
    for trouble, _ in found:
        if trouble is not None:
            raise ConfigError(trouble)
    return [value for _, value in found]


def _same(work: Callable[[], T], what: str) -> T:
    """Do the work on every rank, and check that its result is the same on all.

    Raises:
        ConfigError: it differs.
    """
    found = everyone(work)
    for rank, value in enumerate(found):
        if value != found[0]:
            raise ConfigError(
                f"rank {rank} {what} {value!r} and rank 0 {found[0]!r}; give all ranks the same folder, which they all see, and the same tag"
            )
    return found[0]


def begin(save_dir: str, tag: str) -> tuple[str, str]:
    """Make an empty folder for a checkpoint; every rank calls it.

    Returns:
        The tag to write it under, and what `publish` knows by that nobody else has begun to write it since.

    Raises:
        ConfigError: ranks name different ones, or there cannot be one.
    """

    def named() -> str:
        if not os.fspath(save_dir):
            raise ConfigError('save_dir = "" names no folder; name one, which "." does for the current one')
        if Path(tag) == Path():
            raise ConfigError(f"tag = {tag!r} names no checkpoint; give a name, or leave it out")
        return str(Path(save_dir) / tag)

    _same(named, "saves")

    def make() -> str:
        Path(save_dir).mkdir(parents=True, exist_ok=True)
        return files.begin(Path(save_dir) / tag)

    marks = everyone(lambda: "" if dist.get_rank() else make())
    return f"{tag}{_ASIDE}", marks[0]


def publish(save_dir: str, tag: str, save_latest: bool, mark: str) -> None:
    """Sum up the checkpoint that was begun and give it its name, in the place of an older one; every rank calls it.

    Args:
        save_dir: where checkpoints are.
        tag: its name.
        save_latest: have `latest` name it.
        mark: what `begin` returned.

    Raises:
        ConfigError: it could not be written to its end, or somebody else has begun to write it.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    aside, pieces = Path(save_dir) / f"{tag}{_ASIDE}", list[sums.Piece]()
    dist.barrier()

    def seen() -> str:
        if rank == 0:
            files.check_writer(Path(save_dir) / tag, mark)
        pieces.extend(sums.cut(aside, _files(aside)))
        return f"{len(pieces)} pieces, {zlib.crc32(repr(pieces).encode()):08x}"

    _same(seen, f"sees in {aside}")
    shares = everyone(lambda: _summed(aside, pieces[rank::world]))
    found = [0] * len(pieces)
    for first, share in enumerate(shares):
        found[first::world] = share

    def name() -> None:
        files.check_writer(Path(save_dir) / tag, mark)
        (aside / files.WRITER).unlink()
        _rename(Path(save_dir), tag, sums.sums_of(pieces, found), save_latest)

    everyone(lambda: None if rank else name())


def _files(folder: Path) -> list[str]:
    """A checkpoint's files; of a folder that is sealed by itself, the seal."""
    sealed = {seal.parent for seal in folder.rglob(files.MANIFEST)}
    own = (file for file in folder.rglob("*") if file.is_file() and file != folder / files.WRITER)
    kept = [file for file in own if file.parent not in sealed or file.name in (files.MANIFEST, files.MARKER)]
    return sorted(str(file.relative_to(folder)) for file in kept)


def _summed(folder: Path, pieces: list[sums.Piece]) -> list[int]:
    for name in {name for name, at, _ in pieces if at == 0}:
        sums.flush(folder / name)
    return sums.checksums(folder, pieces)


def _rename(folder: Path, tag: str, written: sums.Sums, save_latest: bool) -> None:
    aside, replaced = folder / f"{tag}{_ASIDE}", folder / f"{tag}{_REPLACED}"
    if save_latest or (folder / tag / _IS_LATEST).exists():
        sums.put(aside / _IS_LATEST, "")
    sums.seal(aside, written, MANIFEST, MARKER)
    sums.flush(aside)
    note = folder / f"{_LATEST}{_ASIDE}"
    if save_latest:
        sums.put(note, tag)
    files.take_place(aside, folder / tag, replaced, _OWN)
    if save_latest:
        note.replace(folder / _LATEST)
        sums.flush(folder)
        for name in _marked(folder) - {tag}:
            (folder / name / _IS_LATEST).unlink(missing_ok=True)


def _marked(folder: Path) -> set[str]:
    """The checkpoint that ``latest`` names; with the one before where a save died between the two."""
    names = (found.parent.name.removesuffix(_REPLACED) for found in folder.glob(f"*/{_IS_LATEST}"))
    return {name for name in names if not name.endswith(_ASIDE)}


def find(load_dir: str, tag: str | None) -> str | None:
    """The checkpoint to load, once every byte of it has been found as it was written; every rank calls it.

    One that a stock engine wrote has no sums, and is taken as it is; one of plain PyTorch's `compose` has its own.

    Args:
        load_dir: where checkpoints are.
        tag: its name, the latest by default.

    Returns:
        The name under which it stands: the older one's if a newer one was just being renamed. None where there are none.

    Raises:
        ConfigError: there is none of that name, or it is damaged; the same on every rank.
    """
    chosen = _same(lambda: _chosen(Path(load_dir), tag), "would load")
    if chosen is None:
        return None
    folder, rank, world = Path(load_dir) / chosen, dist.get_rank(), dist.get_world_size()
    shares = everyone(lambda: _damage(folder, rank, world))
    if wrong := [what for share in shares for what in share]:
        others = [name for name in _tags(Path(load_dir)) if name != chosen]
        raise ConfigError(
            f"{folder} is damaged in {sums.in_words(wrong)}; restore it, or load another checkpoint: {_in_words(others)}"
        )
    return chosen


def _chosen(folder: Path, tag: str | None) -> str | None:
    if tag is None:
        latest, marked = folder / _LATEST, _marked(folder)
        if not latest.is_file() and not marked:
            return None
        note, tag = folder / f"{_LATEST}{_ASIDE}", _named_in(latest, marked)
        if (not latest.is_file() or _is_strange(folder / tag)) and note.is_file() and _named_in(note, marked) in marked:
            tag = _named_in(note, marked)  # the first save was killed between the two names
        if marked and tag not in marked:
            raise ConfigError(
                f"{latest} names {tag!r} and the checkpoint that was saved as the latest is {min(marked)}, so it is damaged or was changed; pass "
                f"the tag that you mean: {_in_words(_tags(folder))}"
            )
    replaced = f"{tag}{_REPLACED}"
    for name in (str(tag), replaced):
        if (folder / name).is_dir() and name:
            return name
    raise ConfigError(f"{folder} has no checkpoint {tag!r}; correct the folder or the tag: {_in_words(_tags(folder))}")


def _named_in(file: Path, marked: set[str]) -> str:
    tag = file.read_text(errors="replace") if file.is_file() else ""
    return tag if tag in marked else tag.strip()


def _is_strange(folder: Path) -> bool:
    """True if it is a stock engine's, of which no mark says that it is the latest."""
    return _is_one(folder) and not (folder / MARKER).is_file()


def files_in(folder: Path) -> Path:
    """Where a checkpoint's files by the serial model's names are; of one that was just being renamed, the older one's; of many, the latest's.

    Raises:
        ValueError: ``latest`` names none that is there, or one that was written without the block.
    """
    found = portable_in(folder) or portable_in(folder.with_name(f"{folder.name}{_REPLACED}"))
    if found is None and (latest := _chosen(folder, None)) is not None:
        found = portable_in(folder / latest)
        if found is None:
            raise ConfigError(
                f"{folder / latest} was written without the axonn block; load it without the block, or start anew"
            )
    return found or folder


def nothing_in(load_dir: str) -> str:
    """A sentence on a folder in which `find` has found no checkpoint.

    Raises:
        ConfigError: the folder is itself a checkpoint.
    """
    folder = Path(load_dir)
    if not folder.is_dir():
        return f"{folder} does not exist: no checkpoint was loaded"
    if _is_one(folder):
        raise ConfigError(
            f"{folder} is itself a checkpoint; load it by load_checkpoint({str(folder.parent)!r}, tag={folder.name!r})"
        )
    if tags := _tags(folder):
        return (
            f"{folder} has no file {_LATEST}: no checkpoint was loaded; pass the tag that you mean: {_in_words(tags)}"
        )
    return f"there is no checkpoint in {folder}: none was loaded"


def _tags(folder: Path) -> list[str]:
    """Checkpoints in a folder, the newest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_dir() and path.suffix not in (_ASIDE, _REPLACED)]
    found = [path for path in found if _is_one(path)]
    return [path.name for path in sorted(found, key=lambda path: -path.stat().st_mtime_ns)]


def _is_one(folder: Path) -> bool:
    """True if it is a checkpoint: of ours, of another host's that is sealed as a whole, or a stock engine's."""
    return any((folder / marker).is_file() for marker in (MARKER, files.MARKER)) or any(folder.glob("*_states.pt"))


def _in_words(tags: list[str]) -> str:
    more = f" and {len(tags) - 8} more" if len(tags) > 8 else ""
    return (", ".join(tags[:8]) + more) if tags else "there is none"


def _damage(folder: Path, part: int, parts: int) -> list[str]:
    if not (folder / MANIFEST).exists() and not (folder / MARKER).exists():
        if any(folder.glob("axonn*")):
            return [f"{MANIFEST} and {MARKER}, which are missing"]
        return files.damage(folder, part, parts) if (folder / files.STATE).is_file() else []
    wrong = sums.damage(folder, MANIFEST, MARKER, part, parts)
    if f"{MANIFEST} or {MARKER}" in wrong:
        return wrong
    known = sums.listed(folder, MANIFEST)
    for name in known:
        if Path(name).name == files.MANIFEST and (folder / name).is_file():
            inner = (folder / name).parent
            wrong += [f"{inner.name}/{what}" for what in files.damage(inner, part, parts)]
    # DeepSpeed takes such files by pattern.
    strange = {file.name for file in folder.glob("*_states.pt")} - known
    return wrong + [f"{name}, which was not saved with it" for name in strange]
