"""The file in which measured times are kept: by node map, interface and version."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from plugins.pccl.build import folder
from plugins.pccl.choice import Measured

_FORM = 1


def tuning_file() -> Path:
    """``AXONN_PCCL_TUNING`` if that is set, else tuning.json in the cache folder."""
    return Path(os.environ.get("AXONN_PCCL_TUNING") or folder() / "tuning.json")


def key_of(nodes: Sequence[Sequence[int]]) -> str:
    """Under what the times of a group with this node map are kept: groups of as many ranks on as many nodes share them."""
    shape = "+".join(str(len(node)) for node in nodes)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "default")
    return f"nodes {shape}, interface {interface}, form {_FORM}, torch {torch.__version__}"


def read(file: Path, key: str) -> Measured:
    """The times under a key; none where the file or the key is missing.

    Raises:
        ValueError: the file is not one of ours.
    """
    try:
        return Measured.load(json.dumps(_all(file).get(key, {})))
    except ValueError as error:
        raise ValueError(f"tuning file {file} cannot be read ({error}); remove it, or name another") from error


def write(file: Path, key: str, measured: Measured) -> None:
    """Put times under a key; readers see the file as it was, or as it then is."""
    file.parent.mkdir(parents=True, exist_ok=True)
    merged = _all(file) | {key: json.loads(measured.dump())}
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as scratch:
        json.dump(merged, scratch, indent=1)
    os.replace(scratch.name, file)


def _all(file: Path) -> dict[str, object]:
    found = json.loads(file.read_text()) if file.exists() else {}
    if not isinstance(found, dict):
        raise ValueError("it does not hold a table")
    return found
