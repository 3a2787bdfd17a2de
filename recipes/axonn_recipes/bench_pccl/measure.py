"""The work of each rank: check every side's values at every size, and time them in turns."""

from __future__ import annotations

import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_plugins.config import ConfigError
from axonn_plugins.observe.progress import each
from axonn_plugins.pccl import Options, register
from axonn_plugins.pccl.algorithms import algorithms
from axonn_plugins.pccl.backend import planner, using
from axonn_plugins.pccl.choice import Choice
from axonn_recipes.bench.rounds import in_turns
from axonn_recipes.bench_pccl import mpi
from axonn_recipes.bench_pccl.settings import Settings, shown

_PERIOD = 4099  # elements after which inputs repeat; a prime, so that no block is like another
_SHORT, _CALLS = 2**20, 3  # bytes below which a turn is at least so many calls
_CPU = torch.device("cpu")
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
    sides: dict[str, Side] = {"pccl": (torch_calls(None), None), "gloo": (torch_calls(gloo), None)}
    if not mpi.absent():
        sides["mpi"] = (mpi.calls(), None)
    sides |= {str(choice): (torch_calls(None), choice) for choice in settings.algorithms}
    cells: list[dict[str, Any]] = []
    asked = list(itertools.product(settings.collectives, settings.sizes))
    for collective, size in each(asked, "collectives", "size"):
        here = {name: side for name, side in sides.items() if _able(side[1], collective)}
        for name, difference in differences(collective, size, here).items():
            if difference != 0:
                raise ConfigError(f"{name} computes a wrong {collective} of {shown(size)}; nothing is reported")
        cells += _cells(collective, size, here, settings.rounds)
    dist.destroy_process_group()
    return cells


def torch_calls(group: dist.ProcessGroup | None) -> dict[str, Call]:
    """The collectives of a group, by default all ranks'."""
    return {
        "all_gather": lambda whole, own: dist.all_gather_into_tensor(whole, own, group),
        "reduce_scatter": lambda whole, own: dist.reduce_scatter_tensor(own, whole, group=group),
        "all_reduce": lambda whole, own: dist.all_reduce(whole, group=group),
    }


def _able(choice: Choice | None, collective: str) -> bool:
    return choice is None or choice.algorithm in algorithms(collective, dist.get_world_size())


def differences(collective: str, size: int, sides: Mapping[str, Side], place: torch.device = _CPU) -> dict[str, float]:
    """The largest absolute difference of each side's values from what they must be, over all ranks: sums of whole numbers, so none is due.

    Args:
        collective: "all_gather", "reduce_scatter" or "all_reduce".
        size: bytes.
        sides: by name.
        place: where the tensors are.
    """
    whole, own, wanted = (tensor.to(place) for tensor in _data(collective, size))
    source, found = whole.clone(), []
    for calls, choice in sides.values():
        whole.copy_(source)
        with _as(choice):
            calls[collective](whole, own)
        got = own if collective == "reduce_scatter" else whole
        found.append((got - wanted).abs().nan_to_num(nan=torch.inf).max())
    worst = torch.stack(found)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return dict(zip(sides, worst.tolist(), strict=True))


def times(
    collective: str, size: int, sides: Mapping[str, Side], rounds: int, place: torch.device = _CPU
) -> dict[str, list[float]]:
    """Seconds of the slowest rank, by side and round; the arguments are those of `differences`."""
    whole, own, _ = (tensor.to(place) for tensor in _data(collective, size))
    whole.zero_()  # stays so however often it is summed
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    repeats = {}
    for name, (calls, choice) in sides.items():
        with _as(choice):
            repeats[name] = _calls(calls[collective], whole, own, size)
    for _, (name, (calls, choice)) in in_turns(list(sides.items()), rounds):
        with _as(choice):
            calls[collective](whole, own)  # what is planned but once, and what other sides have left in caches
            began = _together(place)
            for _ in range(repeats[name]):
                calls[collective](whole, own)
            _done(place)
            seconds[name].append((time.perf_counter() - began) / repeats[name])
    table = torch.tensor(list(seconds.values()), dtype=torch.float64, device=place)
    dist.all_reduce(table, dist.ReduceOp.MAX)  # the slowest rank's
    return dict(zip(sides, table.tolist(), strict=True))


def _cells(collective: str, size: int, sides: dict[str, Side], rounds: int) -> list[dict[str, Any]]:
    """One collective at one size."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return [
        {
            "nodes": dist.get_world_size() // local,
            "ranks_per_node": local,
            "collective": collective,
            "bytes": size,
            "side": name,
            "choice": took(collective, size) if name == "pccl" else None,
            "seconds": seconds,
        }
        for name, seconds in times(collective, size, sides, rounds).items()
    ]


def took(collective: str, size: int) -> str:
    """The means by which pccl does a collective of the group of all ranks, which all of them make once: "desks", or an algorithm and its chunks."""
    whole, own, _ = _data(collective, size)
    chosen = planner()
    laid = chosen.fabric.core.laid()
    torch_calls(None)[collective](whole, own)
    return "desks" if chosen.fabric.core.laid() > laid else str(chosen.choose(collective, size))


def _together(place: torch.device) -> float:
    """When all ranks begin."""
    _done(place)
    dist.barrier()
    _done(place)
    return time.perf_counter()


def _done(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _calls(call: Call, whole: Tensor, own: Tensor, size: int) -> int:
    """Number of calls in a row that are a turn, on all ranks: with fewer, of short ones, the ranks' different starts would be most of the time."""
    began = _together(whole.device)
    call(whole, own)
    _done(whole.device)
    slowest = torch.tensor(time.perf_counter() - began, dtype=torch.float64, device=whole.device)
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
