"""Locks that a killed build of a torch extension leaves behind, on which every later start waits in silence.

torch guards a build by a file that its maker holds open and removes when done; DeepSpeed's and Megatron's kernels are built so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path


def folder() -> Path:
    """Where torch builds extensions."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named) if named else Path(cache) / "torch_extensions"


def abandoned() -> list[Path]:
    """Locks that no process of this machine holds open; none where there is no /proc to tell."""
    locks = {path.resolve() for pattern in ("*/lock", "*/*/lock") for path in folder().glob(pattern)}
    if not locks or not Path("/proc/self/fd").is_dir():
        return []
    return sorted(lock for lock in locks - set(_opened()) if lock.exists())


def _opened() -> Iterable[Path]:
    for process in Path("/proc").glob("[0-9]*/fd"):
        try:
            links = list(process.iterdir())
        except OSError:  # it has ended, or is another user's
            continue
        for link in links:
            try:
                yield link.readlink()
            except OSError:
                continue


def warn() -> None:
    """Name abandoned locks on stderr, once on each node."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    for lock in abandoned():
        print(
            f'axonn: "{lock}" is of a build that no process of this machine goes on with, and torch waits for it without end: unless another '
            "machine that shares the folder is building, remove it",
            file=sys.stderr,
            flush=True,
        )
