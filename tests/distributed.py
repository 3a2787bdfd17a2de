"""Run a function on gloo ranks: forked after torch is imported, watched, with the failing rank's traceback."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from axonn_plugins.cluster.launch import launch
from axonn_tp import Grid, Mesh


def run_ranks(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """Run `function(*arguments)` on each rank of a gloo process group, and return the results."""
    return launch(_with_group, ranks, function, arguments)


def _with_group(function: Callable[..., Any], arguments: tuple) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return function(*arguments)


def meshes(grids: Iterable[Grid]) -> Iterator[Mesh]:
    """A mesh of each grid, one after the other: each of gloo's groups has a thread that looks a hundred times a second."""
    for grid in grids:
        mesh = Mesh(grid)
        yield mesh
        mesh.destroy()


def same_on_all(value: Any) -> Any:
    """Rank 0's; this rank's where there is no group."""
    if not dist.is_initialized():
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]
