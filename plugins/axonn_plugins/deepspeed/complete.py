"""Checkpoints that are complete or absent: written aside, then renamed; the name in ``latest`` changes last."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch.distributed as dist


def begin(save_dir: str, tag: str) -> str:
    """Make room for a checkpoint; every rank calls it.

    Returns:
        The tag to write it under.
    """
    aside = f"{tag}.incomplete"
    if dist.get_rank() == 0:
        shutil.rmtree(Path(save_dir) / aside, ignore_errors=True)
    dist.barrier()
    return aside


def publish(save_dir: str, tag: str, save_latest: bool) -> None:
    """Give the checkpoint that was begun its name, in the place of an older one; every rank calls it."""
    if dist.get_rank() == 0:
        folder = Path(save_dir)
        aside, replaced = folder / f"{tag}.incomplete", folder / f"{tag}.replaced"
        for file in aside.iterdir():
            _flush(file)
        if (folder / tag).exists():
            shutil.rmtree(replaced, ignore_errors=True)
            (folder / tag).rename(replaced)
        aside.rename(folder / tag)
        _flush(folder)
        shutil.rmtree(replaced, ignore_errors=True)
        if save_latest:
            note = folder / "latest.incomplete"
            note.write_text(tag)
            _flush(note)
            note.replace(folder / "latest")
            _flush(folder)
    dist.barrier()


def find(load_dir: str, tag: str | None) -> str | None:
    """The tag under which a checkpoint stands, the latest by default: the older one if a newer one was just being renamed."""
    latest = Path(load_dir) / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    if tag is None:
        return None
    replaced = f"{tag}.replaced"
    return replaced if not (Path(load_dir) / str(tag)).exists() and (Path(load_dir) / replaced).exists() else str(tag)


def _flush(path: Path) -> None:
    """Make a file or a folder's entries survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
