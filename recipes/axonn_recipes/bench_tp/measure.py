"""The work of each rank: build every side, check that all learn alike, and time them in turns."""

from __future__ import annotations

import gc
import logging
import os
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from axonn_plugins import processors
from axonn_plugins.observe.progress import say
from axonn_plugins.observe.timeline.gather import bring_together
from axonn_plugins.observe.timeline.record import Recorder
from axonn_recipes.bench.rounds import check_losses, in_turns, over_ranks, seconds, slowest
from axonn_recipes.bench_tp import sides
from axonn_recipes.bench_tp.memory import PeakMemory
from axonn_recipes.bench_tp.settings import STAGES, Settings, name, options_of, stage_of, ways
from axonn_tp import Grid

TOLERANCE = 1e-3  # of the first losses, in nats: what rounding of fp32 explains, and no mistake
_CHECKED_STEPS, _SCREENED_STEPS = 3, 2


@dataclass
class Side:
    """One side and what was measured of it; all numbers are the same on every rank.

    Attributes:
        name: shown in the table.
        kind: "peer", "ours" or "stage".
        build: makes its step.
        losses: of the first steps, mean over the batch.
        memory: most bytes of tensors a rank held at once; the largest of all ranks.
        seconds: of each timed step, the slowest rank's.
        inside: bytes a step between ranks of one node, all nodes together; None where the device hides them.
        between: bytes a step between nodes, likewise.
        compute: seconds a step takes when collectives take none.
        timeline: of one more step, where it was asked for.
    """

    name: str
    kind: str
    build: Callable[[], sides.Step] = field(repr=False)
    losses: list[float] = field(default_factory=list)
    memory: int = 0
    seconds: list[float] = field(default_factory=list)
    inside: float | None = None
    between: float | None = None
    compute: float | None = None
    timeline: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def median(self) -> float:
        """Seconds a step."""
        return statistics.median(self.seconds)


def measure(settings: Settings) -> list[Side]:
    """Measure all sides; every rank calls it, and has the result.

    Raises:
        ConfigError: the sides do not compute the same losses.
    """
    prepare(settings)
    dist.init_process_group(settings.wire)
    chosen = [Side(peer, "peer", _peer(peer, settings)) for peer in settings.peers if not sides.absent(peer)]
    steps = {}
    for side in chosen:
        steps[side.name] = first_steps(side)
    grids = _fastest_grids(settings, chosen) if settings.screen else list(settings.grids)
    for grid in grids:
        for how in ways(grid):
            called = f"{name(grid)}, {how}" if how else name(grid)
            chosen.append(side := Side(called, "ours", _ours(grid, settings, how)))
            steps[side.name] = first_steps(side)
    for stage, _ in STAGES:
        chosen.append(side := Side(f"{name(grids[0])}, {stage}", "stage", _ours(grids[0], settings, stage)))
        steps[side.name] = first_steps(side)
    check_losses(chosen, TOLERANCE, advice="leave one out")
    take_turns(chosen, steps, settings.rounds)
    for side in chosen if settings.timeline else ():
        watch = Recorder()
        dist.barrier()
        watch.begin()
        steps[side.name]()
        watch.end()
        side.timeline = bring_together(watch, _CHECKED_STEPS + settings.rounds + 1, side.median)
    return chosen


def compute_only(settings: Settings, names: list[str]) -> dict[str, list[float]]:
    """Seconds of this rank's steps, by side, where collectives return at once without communicating.

    What a step takes longer than that is communication that no computation hid.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    prepare(settings)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    # What a collective leaves unwritten may be denormal numbers, with which arithmetic is slow.
    torch.set_flush_denormal(True)
    grids = {name(grid): grid for grid in settings.grids}
    steps = {}
    for side in names:
        grid, _, how = side.partition(", ")
        make = _ours(grids[grid], settings, how) if grid in grids else _peer(side, settings)
        steps[side] = make()
        steps[side]()
    found: dict[str, list[float]] = {side: [] for side in names}
    for _, side in in_turns(names, settings.rounds):
        found[side].append(seconds(steps[side]))
    return found


def prepare(settings: Settings) -> None:
    """Quiet warnings, this rank's device, and its share of the cores."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    here = settings.ranks if settings.emulated else int(os.environ["LOCAL_WORLD_SIZE"])
    processors.share_among(here)


def _peer(peer: str, settings: Settings) -> Callable[[], sides.Step]:
    return lambda: sides.build(peer, settings)


def _ours(grid: Grid, settings: Settings, how: str = "") -> Callable[[], sides.Step]:
    return lambda: sides.ours(settings, grid, options_of(how), stage=stage_of(how))


def first_steps(side: Side) -> sides.Step:
    """Build a side; its first losses, and the peak memory of a step in the steady state."""
    say(f"building {side.name}")
    with PeakMemory() as memory:
        step = side.build()
        for number in range(_CHECKED_STEPS):
            if number == _CHECKED_STEPS - 1:
                gc.collect()
                memory.restart()
            side.losses += over_ranks([float(step())], dist.ReduceOp.SUM)
    side.losses = [loss / dist.get_world_size() for loss in side.losses]
    side.memory = int(over_ranks([memory.peak], dist.ReduceOp.MAX)[0])
    return step


def _fastest_grids(settings: Settings, peers: list[Side]) -> list[Grid]:
    """Time all grids briefly; the fastest, and for each peer the fastest that needs at most its memory."""
    took, memory = {}, {}
    for grid in settings.grids:
        side = Side(name(grid), "ours", _ours(grid, settings))
        step = first_steps(side)
        memory[grid] = side.memory
        took[grid] = min(slowest(step) for _ in range(_SCREENED_STEPS))
        say(f"{side.name}: {took[grid]:.3f} s")
        del step, side
    ordered = sorted(settings.grids, key=lambda grid: took[grid])
    chosen = ordered[:1]
    for peer in peers:
        chosen += [grid for grid in ordered if memory[grid] <= peer.memory][:1]
    return list(dict.fromkeys(chosen))


def take_turns(measured: list[Side], steps: dict[str, sides.Step], rounds: int) -> None:
    """Time a step of every side in each round.

    Bytes are the least of all rounds, less the least that measuring itself sent: other processes of the machine send over its loopback, too.
    """
    idle: list[tuple[float, float]] = []
    sent: dict[str, list[tuple[float, float]]] = {side.name: [] for side in measured}
    for _, side in in_turns(measured, rounds):
        idle.append(_timed(lambda: None)[1:])
        spent, *links = _timed(steps[side.name])
        side.seconds.append(spent)
        sent[side.name].append((links[0], links[1]))
    if not torch.cuda.is_available():
        nothing = _least(idle)
        for side in measured:
            least = _least(sent[side.name])
            side.inside, side.between = (max(0.0, mine - none) for mine, none in zip(least, nothing, strict=True))


def _least(sent: list[tuple[float, float]]) -> tuple[float, float]:
    return min(inside for inside, _ in sent), min(between for _, between in sent)


def _timed(step: Callable[[], object]) -> tuple[float, float, float]:
    """Seconds of the slowest rank, and bytes inside and between nodes, those of the measurement included."""
    before = _link_bytes()
    took = slowest(step)
    dist.barrier()
    sent = [after - earlier for after, earlier in zip(_link_bytes(), before, strict=True)]
    inside, between = over_ranks(sent, dist.ReduceOp.SUM)
    return took, inside, between


def _link_bytes() -> tuple[float, float]:
    """Bytes sent over loopback and over other interfaces of this node, as its first rank sees them; else 0."""
    if os.environ["LOCAL_RANK"] != "0":
        return 0.0, 0.0
    inside = between = 0.0
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        interface, _, columns = line.partition(":")
        sent = float(columns.split()[8])
        if interface.strip() == "lo":
            inside += sent
        else:
            between += sent
    return inside, between
