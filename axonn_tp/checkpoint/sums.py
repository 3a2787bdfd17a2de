"""Checksums of a folder's files, and the manifest that keeps them; threads and ranks share the bytes."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# By file: (bytes, CRC-32, what is stored there) of the pieces that follow one another in it.
Sums = dict[str, list[tuple[int, int, str]]]
# File, offset, bytes.
Piece = tuple[str, int, int]
_PIECE_BYTES, _BUFFER, _THREADS = 32 * 2**20, 8 * 2**20, 4


def crc(file: Path, offset: int, length: int) -> int:
    """The CRC-32 of a part of a file."""
    found = 0
    with file.open("rb") as stream:
        stream.seek(offset)
        while length > 0 and (part := stream.read(min(_BUFFER, length))):
            found, length = zlib.crc32(part, found), length - len(part)
    return found


def cut(folder: Path, names: Iterable[str]) -> list[Piece]:
    """Files in pieces of a size that ranks can share; an empty file is one piece."""
    found: list[Piece] = []
    for name in names:
        size = (folder / name).stat().st_size
        found += [(name, at, min(_PIECE_BYTES, size - at)) for at in range(0, max(size, 1), _PIECE_BYTES)]
    return found


def checksums(folder: Path, pieces: Iterable[Piece]) -> list[int]:
    """The pieces' CRC-32, by several threads."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(lambda piece: crc(folder / piece[0], piece[1], piece[2]), pieces))


def sums_of(pieces: Iterable[Piece], found: Iterable[int]) -> Sums:
    """The checksums of pieces as a manifest keeps them, in the order of `cut`."""
    sums: Sums = {}
    for (name, _, length), value in zip(pieces, found, strict=True):
        sums.setdefault(name, []).append((length, value, name))
    return sums


def seal(folder: Path, sums: Sums, manifest: str, marker: str) -> None:
    """Write the manifest, and last of all the marker that holds its checksum."""
    put(folder / manifest, json.dumps({"version": 1, "files": dict(sorted(sums.items()))}))
    put(folder / marker, hashlib.sha256((folder / manifest).read_bytes()).hexdigest())


def listed(folder: Path, manifest: str) -> set[str]:
    """The files that an undamaged manifest names."""
    return set(json.loads((folder / manifest).read_bytes())["files"])


def damage(folder: Path, manifest: str, marker: str, part: int = 0, parts: int = 1) -> list[str]:
    """Compare files with what was written.

    Args:
        folder: what `seal` closed.
        manifest: its name.
        marker: its name.
        part: which of the `parts` shares of the bytes is compared here; ranks share the work.
        parts: how many there are.

    Returns:
        What is missing, shorter, longer or otherwise: files, and what they hold there.
    """
    own = [folder / name for name in (manifest, marker)]
    text, known = (file.read_bytes() if file.is_file() else b"" for file in own)
    if hashlib.sha256(text).hexdigest().encode() != known:
        return [f"{manifest} or {marker}"]
    sums: Sums = json.loads(text)["files"]
    wrong, pieces, wanted, number = set(), list[Piece](), list[tuple[int, str]](), 0
    for name, stored in sums.items():
        file, offset = folder / name, 0
        fits = file.is_file() and file.stat().st_size == sum(length for length, *_ in stored)
        for length, value, what in stored:
            if number % parts == part and fits:
                pieces.append((name, offset, length))
                wanted.append((value, name if what == name else f"{name}, which holds {what}"))
            elif number % parts == part:
                wrong.add(name)
            offset, number = offset + length, number + 1
    for found, (value, what) in zip(checksums(folder, pieces), wanted, strict=True):
        if found != value:
            wrong.add(what)
    return sorted(wrong)


def in_words(wrong: Iterable[str]) -> str:
    """Word the damage that was found on all ranks as a part of a sentence."""
    names = sorted(set(wrong))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return "; ".join(names[:3]) + more


def flush(path: Path) -> None:
    """Make a file, or a folder's entries, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def put(file: Path, text: str) -> None:
    """Write a file that survives a power cut."""
    file.write_text(text)
    flush(file)
