"""Process groups made once for the same ranks: Megatron makes some forty for every grid, DeepSpeed some for every engine, and both
only forget them, threads and all."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh


def reuse() -> None:
    """Do so from now on in this process, a rank whose cases follow each other."""
    original = dist.new_group
    if hasattr(original, "made"):
        return
    made: dict[tuple, Any] = {}

    def new_group(ranks: list[int] | None = None, *args: Any, backend: Any = None, **named: Any) -> Any:
        key = (None if ranks is None else tuple(ranks), backend)
        if key not in made:
            made[key] = original(ranks, *args, backend=backend, **named)
        return made[key]

    new_group.made = made  # type: ignore[attr-defined]
    dist.new_group = device_mesh.new_group = new_group  # type: ignore[assignment]
