"""Groups of ours take as long as the world's, where torch gives those made without a timeout its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from axonn_plugins.cluster.launch import launch
from axonn_tp import Grid, Mesh
from axonn_tp.checkpoint.ranks import Ranks
from axonn_tp.grid.timeouts import world_timeout
from ted_moe.topology import Groups, Topology


def _groups() -> Iterator[dist.ProcessGroup]:
    mesh = Mesh(Grid(2, 1, 2, sequence=2))
    for one in (mesh, mesh.over(Grid(1, 2, 2))):
        yield from one._groups.values()
    yield from Groups(Topology(world=4, tensor=2, expert=2))._groups.values()
    ranks = Ranks(mesh)
    assert ranks.group is not None
    yield ranks.group


def _timeouts(folder: Path) -> dict[float, set[float]]:
    """Seconds of our groups, by the world's."""
    found = {}
    for seconds in (77, None):
        limit = None if seconds is None else timedelta(seconds=seconds)
        store = dist.FileStore(str(folder / str(seconds)), 4)
        dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=4, timeout=limit)
        found[world_timeout().total_seconds()] = {
            group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in _groups()
        }
        dist.barrier()
        dist.destroy_process_group()
    return found


def test_groups_have_the_timeout_of_the_world(tmp_path: Path) -> None:
    assert launch(_timeouts, 4, tmp_path) == 4 * [{77: {77}, 1800: {1800}}]
