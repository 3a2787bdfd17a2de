"""Run a function on ranks: forked after torch is imported, watched, with the failing rank's traceback.

Ranks talk by pccl, which takes a tenth of gloo's processor time where they share cores; `AXONN_TESTS_BACKEND=gloo` is for
comparing, and tests about gloo name it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from axonn_plugins.cluster.launch import launch
from axonn_plugins.pccl import backend as pccl
from axonn_tp import Grid, Mesh
from tests.searched_once import share_searches

BACKEND = os.environ.get("AXONN_TESTS_BACKEND", "pccl")


def run_ranks(function: Callable[..., Any], ranks: int, *arguments: Any, backend: str = BACKEND) -> list[Any]:
    """Run `function(*arguments)` on each rank of a process group, and return the results."""
    compiled()
    with tempfile.TemporaryDirectory(prefix="searches-") as folder:
        return launch(_with_group, ranks, function, arguments, backend, folder)


def compiled() -> None:
    """Load pccl before ranks are forked, that none of them has to."""
    if BACKEND == "pccl":
        pccl.load()


def _with_group(function: Callable[..., Any], arguments: tuple, backend: str, folder: str) -> Any:
    torch.set_num_threads(1)
    share_searches(folder)
    dist.init_process_group(backend)
    return function(*arguments)


def meshes(grids: Iterable[Grid]) -> Iterator[Mesh]:
    """A mesh of each grid, one after the other: each of gloo's groups has a thread that looks a hundred times a second."""
    for grid in grids:
        mesh = Mesh(grid)
        yield mesh
        mesh.destroy()


def made_once(make: Callable[[], Any]) -> Any:
    """Something that rank 0 makes, as a run in one process to compare with, on all ranks."""
    return same_on_all(make() if not dist.is_initialized() or dist.get_rank() == 0 else None)


def same_on_all(value: Any) -> Any:
    """Rank 0's; this rank's where there is no group."""
    if not dist.is_initialized():
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]
