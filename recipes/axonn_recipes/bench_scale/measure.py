"""The costs at each number of ranks: processor seconds and memory of a call, and what is counted."""

from __future__ import annotations

import gc
import math
import pickle
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from axonn_plugins.observe.progress import say
from axonn_plugins.pccl.contest import BUDGET
from axonn_recipes.bench_scale import collectives, saving, starting
from axonn_recipes.bench_scale.growth import BYTES, SECONDS, Verdict, judge
from axonn_recipes.bench_scale.standin import grid_of, one_of, places
from axonn_recipes.bench_scale.starting import Start

TUNER = "pccl: tuner, once a cluster"
"""May take its budget."""
FEW = 64
"""Keys and links that a rank may need at `growth.AT` ranks: four times the logarithm of the ranks, and something for all."""
SECONDS_UNIT, BYTES_UNIT, COUNT_UNIT = "s", "B", ""
_BARS = {SECONDS_UNIT: SECONDS, BYTES_UNIT: float(BYTES), COUNT_UNIT: float(FEW)}
Costs = Iterator[tuple[str, str, float]]
"""Name, unit, cost."""
Cost = Callable[..., Costs]


@dataclass
class Curve:
    """A cost over the number of ranks.

    Attributes:
        what: is measured.
        unit: "s" of one core, "B" of memory or of messages, or nothing for a count.
        costs: by ranks, the worst of the ranks that were measured.
    """

    what: str
    unit: str
    costs: dict[int, float] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """The curve beside the bars."""
        return judge(self.costs, BUDGET if self.what == TUNER and self.unit == SECONDS_UNIT else _BARS[self.unit])


def measure(sizes: Sequence[int], most: int = 3, memory: bool = True) -> list[Curve]:
    """The curves of all parts.

    Args:
        sizes: numbers of ranks.
        most: of so many ranks each, the first among them.
        memory: whether memory is measured too, which takes several times as long.
    """
    cost = partial(_cost, memory=memory)
    curves: dict[tuple[str, str], Curve] = {}
    worst: dict[tuple[str, str, int], float] = defaultdict(float)
    _warm(partial(_cost, memory=False))
    for ranks in sizes:
        for rank in places(ranks)[:most]:
            say(f"rank {rank} of {ranks}")
            for what, unit, value in (*_of_groups(cost, ranks, rank), *_of_pccl(cost, ranks, rank)):
                worst[what, unit, ranks] = max(worst[what, unit, ranks], value)
        for what, unit, value in _of_metadata(cost, ranks):
            worst[what, unit, ranks] = value
    for (what, unit, ranks), value in worst.items():
        curves.setdefault((what, unit), Curve(what, unit)).costs[ranks] = value
    return list(curves.values())


def _warm(cost: Cost) -> None:
    """Imports and caches, whatever the ranks."""
    for _ in (*_of_groups(cost, 8, 0), *_of_pccl(cost, 64, 0)):
        pass
    gc.collect()
    gc.freeze()  # the modules: collections are then quick


def _cost(what: str, call: Callable[[], object], memory: bool = True) -> Costs:
    """Processor seconds of a call, and the most memory it held above what was there before, in a call of its own."""
    gc.collect()
    began = time.process_time()
    kept = call()
    yield what, SECONDS_UNIT, (time.process_time() - began)
    del kept
    if not memory:
        return
    gc.collect()
    tracemalloc.start()
    kept = call()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    yield what, BYTES_UNIT, most
    del kept


def _of_groups(cost: Cost, ranks: int, rank: int) -> Costs:
    with one_of(ranks, rank):
        start = Start(ranks, rank)
        yield from cost("mesh: its groups", start.make_mesh)
        yield from cost("parallelize", start.split)
        yield from cost("engine start, plain PyTorch", lambda: starting.plain_engine(start))
        yield from cost("ledger of a step", start.ledger)
        yield from cost("save: own plan", lambda: saving.own_plan(start))
        yield from cost("save: agreements", lambda: saving.agreements(start))
        yield from cost("save: random states", lambda: saving.random_states(start))


def _of_pccl(cost: Cost, ranks: int, rank: int) -> Costs:
    meeting = collectives.Meeting(ranks, rank)
    meeting()
    role = "rank 0" if rank == 0 else "other ranks"
    yield f"pccl: requests to the store, {role}", COUNT_UNIT, meeting.store.calls
    yield f"pccl: read from the store, {role}", BYTES_UNIT, meeting.store.received
    yield from cost(f"pccl: rendezvous, {role}", meeting)
    yield "pccl: links for small calls", COUNT_UNIT, collectives.links(ranks, rank)
    if rank == 0:
        return
    for collective, choice in collectives.chosen(ranks):
        named = f"pccl: schedule, {collective} by {choice.algorithm}"
        yield from cost(named, partial(collectives.schedule, collective, choice, ranks, rank))


def _of_metadata(cost: Cost, ranks: int) -> Costs:
    """Costs that are the same for all ranks, or rank 0's alone."""
    grid = grid_of(ranks)
    yield from cost("automatic plan", lambda: starting.plan(Start(ranks, 0)))
    stored = saving.stored(grid)
    yield "checkpoint's metadata, Llama 70B: chunks", BYTES_UNIT, len(pickle.dumps(stored))
    yield "checkpoint's metadata, Llama 70B: where in files", BYTES_UNIT, saving.places_in_files(stored)
    yield from cost("resume: own plan, Llama 70B", lambda: saving.resuming(grid, stored))
    yield from cost(TUNER, lambda: collectives.tuner(ranks, 1))


def shown(value: float, unit: str) -> str:
    """A cost with its unit."""
    if unit == SECONDS_UNIT:
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
    if unit == BYTES_UNIT:
        return f"{value / 2**20:,.2f} MiB" if value < 2**30 else f"{value / 2**30:,.1f} GiB"
    return f"{math.ceil(value):,}"
