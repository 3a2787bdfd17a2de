"""What each rank does: check every side's values at every size, and time them in turns."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_plugins.config import ConfigError
from axonn_plugins.pccl import Options, register
from axonn_plugins.pccl.algorithms import algorithms
from axonn_plugins.pccl.backend import planner, using
from axonn_plugins.pccl.choice import Choice
from axonn_recipes.bench.rounds import in_turns
from axonn_recipes.bench_pccl import mpi
from axonn_recipes.bench_pccl.settings import Settings, shown

_PERIOD = 4099  # elements after which inputs repeat; a prime, so that no block is like another
_SHORT, _CALLS = 2**20, 3  # bytes below which a turn is at least so many calls
_TURN, _MOST_CALLS = 0.02, 500  # seconds that a turn should last, with so many calls at most

Call = Callable[[Tensor, Tensor], object]
Side = tuple[dict[str, Call], Choice | None]
"""Its collectives on (all blocks, own block), and the choice that it is."""


def measure(settings: Settings) -> list[dict[str, Any]]:
    """Measure on this cluster; every rank calls it, and has the cells of the result.

    Raises:
        ConfigError: a side computes wrong values.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    register()
    dist.init_process_group("cpu:pccl", pg_options=replace(Options.from_environment(), tune=settings.tune))
    gloo = dist.new_group(backend="gloo")
    sides: dict[str, Side] = {"pccl": (_torch(None), None), "gloo": (_torch(gloo), None)}
    if not mpi.absent():
        sides["mpi"] = (mpi.calls(), None)
    sides |= {str(choice): (_torch(None), choice) for choice in settings.algorithms}
    cells = []
    for collective in settings.collectives:
        here = {name: side for name, side in sides.items() if _able(side[1], collective)}
        for size in settings.sizes:
            cells += _cells(collective, size, here, settings.rounds)
    dist.destroy_process_group()
    return cells


def _torch(group: dist.ProcessGroup | None) -> dict[str, Call]:
    return {
        "all_gather": lambda whole, own: dist.all_gather_into_tensor(whole, own, group),
        "reduce_scatter": lambda whole, own: dist.reduce_scatter_tensor(own, whole, group=group),
        "all_reduce": lambda whole, own: dist.all_reduce(whole, group=group),
    }


def _able(choice: Choice | None, collective: str) -> bool:
    return choice is None or choice.algorithm in algorithms(collective, dist.get_world_size())


def _cells(collective: str, size: int, sides: dict[str, Side], rounds: int) -> list[dict[str, Any]]:
    """One collective at one size."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    whole, own, wanted = _data(collective, size)
    source = whole.clone()
    for name, (calls, choice) in sides.items():
        whole.copy_(source)
        with _as(choice):
            calls[collective](whole, own)
        got = own if collective == "reduce_scatter" else whole
        _check(torch.equal(got, wanted), f"{name} computes a wrong {collective} of {shown(size)}")
    whole.zero_()  # stays so however often it is summed
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    repeats = {}
    for name, (calls, choice) in sides.items():
        with _as(choice):
            repeats[name] = _calls(calls[collective], whole, own, size)
    for _, (name, (calls, choice)) in in_turns(list(sides.items()), rounds):
        with _as(choice):
            calls[collective](whole, own)  # what is planned but once, and what other sides have left in caches
            dist.barrier()
            began = time.perf_counter()
            for _ in range(repeats[name]):
                calls[collective](whole, own)
            seconds[name].append((time.perf_counter() - began) / repeats[name])
    table = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(table, dist.ReduceOp.MAX)  # the slowest rank's
    return [
        {
            "nodes": dist.get_world_size() // local,
            "ranks_per_node": local,
            "collective": collective,
            "bytes": size,
            "side": name,
            "choice": str(planner().choose(collective, size)) if name == "pccl" else None,
            "seconds": times,
        }
        for name, times in zip(sides, table.tolist(), strict=True)
    ]


def _calls(call: Call, whole: Tensor, own: Tensor, size: int) -> int:
    """How many calls in a row are a turn, on all ranks: else, of what is short, when the ranks begin is most of the time."""
    dist.barrier()
    began = time.perf_counter()
    call(whole, own)
    slowest = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return max(_CALLS if size < _SHORT else 1, min(math.ceil(_TURN / slowest.item()), _MOST_CALLS))


def _as(choice: Choice | None) -> AbstractContextManager[None]:
    return using(choice) if choice else nullcontext()


def _data(collective: str, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """All blocks, the own block, and what the collective must make: random whole numbers, whose sums are exact."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    each = max(1, size // 4 // ranks)
    bases = torch.randint(-1000, 1000, (ranks, _PERIOD), generator=torch.Generator().manual_seed(size)).float()
    if collective == "all_gather":
        wanted = torch.cat([_long(base, each) for base in bases])
        return torch.empty_like(wanted), _long(bases[rank], each), wanted
    sums = _long(bases.sum(0), each * ranks)
    wanted = sums if collective == "all_reduce" else sums[rank * each : (rank + 1) * each]
    return _long(bases[rank], each * ranks), torch.empty(each), wanted


def _long(base: Tensor, elements: int) -> Tensor:
    return base.repeat(-(-elements // _PERIOD))[:elements].contiguous()


def _check(holds: bool, wrong: str) -> None:
    """Raise on all ranks where something does not hold on one."""
    all_hold = torch.tensor([int(holds)])
    dist.all_reduce(all_hold, dist.ReduceOp.MIN)
    if not all_hold.item():
        raise ConfigError(f"{wrong}; nothing is reported")
