"""The states of the random number generators of torch, the device, Python and NumPy, of every rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from axonn_tp.checkpoint.planner import Place
from axonn_tp.grid.mesh import Grid


def random_state() -> dict[str, Any]:
    """The states of this rank."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None,
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Make them those that `random_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002


def source_rank(place: Place, saved: Grid) -> int:
    """The rank of the saved grid whose states this one takes.

    Its own on the same grid; where as many ranks read different tokens, that of a rank that read the same; else
    that of rank 0, so that ranks with other tokens then draw the same numbers.
    """
    at, grid = place.coordinates, place.grid
    if grid == saved:
        return grid.rank(**at)
    if grid.batch != saved.batch:
        return 0
    data, z = divmod(at["z"] + grid.gz * at["data"], saved.gz)
    return saved.rank(z=z, data=data)
