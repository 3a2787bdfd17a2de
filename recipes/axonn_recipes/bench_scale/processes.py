"""Real processes: how they meet, how many sockets each has by then, and what they are told when one of them stops."""

from __future__ import annotations

import os
import re
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from axonn_plugins.cluster.launch import launch
from axonn_recipes.bench_scale.collectives import NODE

_TIMEOUT = 20.0  # seconds of the call in which one is missing
_START = 600.0


@dataclass(frozen=True)
class Rank:
    """The findings of one rank.

    Attributes:
        met: seconds until its first group was there.
        processor: seconds of a core that it took for that.
        sockets: it had before its first call.
        after: those after an all-reduce.
        told: seconds from the timeout of the call in which one was missing until its error.
        questions: it asked others in that call.
        error: the words of it.
    """

    met: float
    processor: float
    sockets: int
    after: int
    told: float
    questions: int
    error: str


@dataclass(frozen=True)
class Lost:
    """All ranks that were left.

    Attributes:
        lost: the rank that stopped.
        ranks: the others.
    """

    lost: int
    ranks: list[Rank]

    @property
    def named(self) -> int:
        """The number of ranks that were told the lost rank's number."""
        return sum(re.search(rf"rank {self.lost}\b", rank.error) is not None for rank in self.ranks)


def lose_one(processes: int) -> Lost:
    """Start so many ranks, as nodes of `NODE`, stop the one in the middle, and hear what the others are told."""
    from axonn_plugins.pccl.build import load

    load()  # before ranks are forked, which would each wait for the compiler
    lost = processes // 2
    os.environ |= {"AXONN_PCCL_TUNE": "0", "AXONN_PCCL_RANKS_PER_NODE": str(NODE)}
    found = launch(_rank, processes, lost, time.time(), timeout=_START)
    return Lost(lost, [rank for rank in found if rank is not None])


def _rank(lost: int, began: float) -> Rank | None:
    from axonn_plugins.pccl.backend import planner, register

    register()
    torch.set_num_threads(1)
    started = time.process_time()
    dist.init_process_group("pccl", timeout=timedelta(seconds=_START))
    met, processor, sockets = time.time() - began, time.process_time() - started, _sockets()
    dist.all_reduce(torch.ones(1))
    after, rank = _sockets(), dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=_TIMEOUT))
    dist.all_reduce(torch.ones(1), group=group)
    store = dist.distributed_c10d._get_default_store()
    if rank == lost:
        store.set("scale lost", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    core = planner(group).fabric.core
    stopped, error, call, before = int(store.get("scale lost")), "", time.monotonic(), core.questions()
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as failed:
        error = str(failed)
    told, questions = time.monotonic() - call - _TIMEOUT, core.questions() - before
    if store.add("scale told", 1) == dist.get_world_size() - 1:
        os.kill(stopped, signal.SIGCONT)
    return Rank(met, processor, sockets, after, told, questions, error)


def _sockets() -> int:
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found += os.readlink(entry).startswith("socket:")
        except OSError:  # the folder's own
            continue
    return found


def described(found: Lost) -> str:
    """A paragraph on it."""

    def span(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    ranks = found.ranks
    lines = [
        f"{len(ranks) + 1} processes, as nodes of {NODE}",
        f"met after {span([rank.met for rank in ranks])} s, of which {span([rank.processor for rank in ranks])} s of a core each",
        f"sockets a rank before the first call {span([rank.sockets for rank in ranks])}, after an all-reduce {span([rank.after for rank in ranks])}",
        f"rank {found.lost} stopped: {found.named} of {len(ranks)} were told its number, {span([rank.told for rank in ranks])} s after the "
        f"timeout of {_TIMEOUT:g} s, after {span([rank.questions for rank in ranks])} questions each",
    ]
    return "\n".join(lines)
