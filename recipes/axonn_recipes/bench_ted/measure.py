"""The work of each rank: build the sides, check that they learn alike, count, and time their steps in turns."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch.distributed as dist

from axonn_plugins import processors
from axonn_plugins.observe.ledger import Ledger
from axonn_plugins.observe.progress import say
from axonn_recipes.allocations import most_allocated
from axonn_recipes.bench.rounds import check_losses, in_turns, over_ranks, slowest, together
from axonn_recipes.bench_ted.blocking import KINDS, Blocking, counted
from axonn_recipes.bench_ted.settings import Settings
from axonn_recipes.bench_ted.sides import SIDES, Ranks, Step, mean_loss

TOLERANCE = 1e-4  # of the first losses, in nats: what rounding of fp32 explains, and no mistake
_CHECKED_STEPS = 3


@dataclass
class Side:
    """One side and what was measured of it; all numbers are the same on every rank.

    Attributes:
        name: shown.
        losses: of the first steps, mean over the batch.
        seconds: of each timed step, the slowest rank's.
        parts: by kind of collective, seconds of each step with blocking collectives, mean over the ranks.
        blocking: seconds of these steps less the collectives, likewise: computing, and waiting for later ranks.
        calls: collectives a step, by kind.
        sent: bytes that a rank sends a step, by kind.
        memory: most bytes that a step allocated, above weights and the optimizer's state; the rank with most.
        stashed: bytes of it that communication-aware checkpointing holds after the forward.
    """

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    blocking: list[float] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    memory: int = 0
    stashed: int = 0


def measure(settings: Settings) -> list[Side]:
    """Measure all sides; every rank calls it, and has the result.

    Raises:
        ConfigError: the sides do not compute the same losses.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)
    processors.share_among(settings.ranks)
    dist.init_process_group(settings.wire)
    ranks = Ranks(settings)
    made = []
    for name in SIDES:
        say(f"building {name}")
        made.append((side := Side(name), step := Step(name, settings, ranks)))
        side.losses = [mean_loss(step()) for _ in range(_CHECKED_STEPS)]
    check_losses([side for side, _ in made], TOLERANCE)
    for side, step in made:
        _count(side, step)
    for _, (side, step) in in_turns(made, settings.rounds):
        side.seconds.append(slowest(step))
        _split(side, step)
    return [side for side, _ in made]


def _count(side: Side, step: Step) -> None:
    with Ledger(step.axis_names) as ledger:
        step()
    assert not ledger.unknown, ledger.unknown
    side.calls, side.sent = counted(ledger)
    memory, stashed = over_ranks([most_allocated(step), step.stashed], dist.ReduceOp.MAX)
    side.memory, side.stashed = int(memory), int(stashed)


def _split(side: Side, step: Step) -> None:
    """A step's time by kind of collective."""
    with Blocking(step.axis_names) as ledger:
        whole = together(step)
    mine = ledger.seconds()
    summed = over_ranks([*mine.values(), whole - sum(mine.values())], dist.ReduceOp.SUM)
    *parts, rest = (seconds / dist.get_world_size() for seconds in summed)
    for kind, seconds in zip(mine, parts, strict=True):
        side.parts[kind].append(seconds)
    side.blocking.append(rest)
