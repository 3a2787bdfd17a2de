"""The states of the random number generators of torch, the device, Python and NumPy, of every rank.

A state has some ten thousand bytes. Of ranks in the same state, as those that compute on the same tokens are, the first
writes it, in a file of its own, and each reads one when it resumes.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from axonn_tp.checkpoint import sums
from axonn_tp.checkpoint.planner import Place
from axonn_tp.checkpoint.sums import Sums
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


def writers_of(state: dict[str, Any], group: dist.ProcessGroup | None) -> list[int]:
    """For each rank the first rank that is in the same state, which writes it; every rank of the group calls it, None for one alone."""
    if group is None:
        return [0]
    mine = torch.frombuffer(bytearray(_digest(state)), dtype=torch.int64)[:2].clone()
    every = mine.new_zeros(dist.get_world_size(group), 2)
    every[dist.get_rank(group)] = mine
    dist.all_reduce(every, group=group)
    first: dict[tuple[int, ...], int] = {}
    return [first.setdefault(tuple(one), rank) for rank, one in enumerate(every.tolist())]


def _digest(state: dict[str, Any]) -> bytes:
    """The same for equal states, which a pickled tensor is not."""
    plain = {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
    return hashlib.sha256(pickle.dumps(plain)).digest()


def write_random_state(folder: Path, state: dict[str, Any], writers: list[int], rank: int) -> Sums:
    """Write this rank's state, if it is among the writers; returns the checksum of the file that was written."""
    if writers[rank] != rank:
        return {}
    text, file = pickle.dumps(state), folder / _name(rank)
    file.write_bytes(text)
    sums.flush(file)
    return {file.name: [(len(text), sums.crc(file, 0, len(text)), file.name)]}


def read_random_state(folder: Path, known: list[Any], rank: int) -> dict[str, Any]:
    """The state of a rank of the run that was saved.

    Args:
        folder: the checkpoint.
        known: its notes: by rank, who has written its state; or, in those of earlier versions, the state.
        rank: whose.
    """
    found: Any = known[rank]
    if isinstance(found, int):
        found = pickle.loads((folder / _name(found)).read_bytes())
    return dict(found)


def _name(rank: int) -> str:
    return f"random_{rank}.pickle"


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
