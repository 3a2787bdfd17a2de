"""A file on what each parameter of the whole model keeps, for other programs to read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

import samo
from axonn_plugins.observe.files import put


def kept_by_all(
    masks: Mapping[str, Tensor], parameters: Mapping[str, Tensor], shards: samo.Shards
) -> dict[str, dict[str, Any]]:
    """Count what masks keep of each whole parameter; every rank calls it.

    Args:
        masks: of this rank's parts, by name.
        parameters: these.
        shards: where they lie.

    Returns:
        By name, shape, elements, how many are kept, and the sparsity; the same on every rank.
    """
    mine = {}
    for name, mask in masks.items():
        shard = shards.find(name, parameters[name])
        mine[name] = shard.shape, int(mask.sum()) / shard.copies
    everyone: list[dict[str, tuple[tuple[int, ...], float]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    counts: dict[str, float] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for found in everyone:
        for name, (shape, kept) in found.items():
            shapes[name], counts[name] = shape, counts.get(name, 0) + kept
    rows = {}
    for name, shape in shapes.items():
        kept, elements = round(counts[name]), samo.Shard(shape).numel
        rows[name] = {
            "shape": list(shape),
            "elements": elements,
            "kept": kept,
            "sparsity": 1 - kept / max(elements, 1),
        }
    return rows


def write(file: str, step: int, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the file, complete or not at all.

    Raises:
        ValueError: it cannot be written.
    """
    elements, kept = (sum(row[key] for row in rows.values()) for key in ("elements", "kept"))
    whole = {"elements": elements, "kept": kept, "sparsity": 1 - kept / max(elements, 1)}
    path = Path(file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, json.dumps({"step": step, "pruned": whole, "parameters": rows}, indent=2) + "\n")
    except OSError as error:
        raise ValueError(
            f'report = "{file}" cannot be written ({error}); give a file in a folder that rank 0 may write to'
        ) from None
