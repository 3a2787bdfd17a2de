"""Files that are complete or absent, however the command that writes them ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def complete(file: Path) -> Iterator[Path]:
    """Give a path to write to, which takes the file's place at the end of the block; after an error it is gone.

    A device such as /dev/null, or a file in a folder that others own, is written in place.
    """
    file = Path(os.path.realpath(file))
    if file.exists() and not (file.is_file() and os.access(file.parent, os.W_OK)):
        yield file
        return
    aside = file.with_name(f".{os.getpid()}-{file.name}")  # with its suffix, by which libraries choose a format
    try:
        yield aside
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)


def put(file: Path, text: str) -> None:
    """Write a text in UTF-8."""
    with complete(file) as aside:
        aside.write_text(text, encoding="utf-8")
