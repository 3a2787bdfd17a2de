"""The work of each rank: build the sides, check that they learn alike, and time their batches in turns."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from axonn_plugins.autoload import activate
from axonn_plugins.pipeline.events import Event
from axonn_recipes.bench.rounds import check_losses, in_turns, slowest
from axonn_recipes.bench_pipeline.settings import COMPUTE, UNEVEN, Settings
from axonn_recipes.bench_pipeline.sides import BLOCKS, HALVES, OURS, STOCK, TORCH, Batch, deepspeed_engine, make
from axonn_recipes.bench_pipeline.work import Pace

# Of the losses, which are near 2: what rounding explains, and no mistake; DeepSpeed sums bf16 gradients in fp32.
TOLERANCE, TOLERANCE_OF_HALVES = 1e-5, 2e-2
SWEPT = {"stages": [OURS, STOCK], "scaling": [OURS, STOCK], "memory": list(HALVES)}
_CHECKED = 2


@dataclass
class Side:
    """One side and what was measured of it.

    Attributes:
        name: shown.
        losses: of the first batches.
        seconds: of each timed batch, the slowest rank's.
        failed: why it could not run; then nothing was measured.
    """

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failed: str | None = None


def prepare(settings: Settings) -> Pace:
    """Start the process group, and say how fast this rank is."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    activate()
    torch.set_num_threads(1)
    os.environ["AXONN_PCCL_TUNE"] = "0"
    import deepspeed

    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed(settings.wire, verbose=False)
    slow = settings.scenario == UNEVEN and dist.get_rank() % settings.ranks == settings.ranks // 2
    jitter = settings.jitter if settings.scenario == COMPUTE else 0.0
    return Pace(settings.milliseconds / 1e3, jitter, settings.slow if slow else 1.0)


def measure(settings: Settings, names: list[str] | None = None) -> list[Side]:
    """Time sides, by default all; every rank calls it, and has the result.

    Raises:
        ConfigError: the sides do not compute the same losses.
    """
    pace = prepare(settings)
    made: list[tuple[Side, Batch]] = []
    for name in names or [*BLOCKS, *TORCH]:
        with _silent():
            made.append((side := Side(name), batch := make(name, settings, pace)))
            side.losses = [batch() for _ in range(_CHECKED)]
    check_losses([side for side, _ in made], TOLERANCE_OF_HALVES if made[0][0].name in HALVES else TOLERANCE)
    for number, (side, batch) in in_turns(made, settings.rounds):
        pace.begin(number)
        side.seconds.append(slowest(batch))
    return [side for side, _ in made]


def timelines(settings: Settings) -> list[list[Event]]:
    """The events of a message-driven batch, by stage of the first pipeline; every rank calls it."""
    pace = prepare(settings)
    with _silent():
        batch, engine = deepspeed_engine(BLOCKS[OURS], settings, pace)
        engine.record_events()
        for number in range(3):
            pace.begin(number)
            batch()
    everyone: list[Any] = [None] * settings.ranks
    dist.all_gather_object(everyone, (engine.stage_id, [tuple(event) for event in engine.events]))
    found = dict(everyone)
    return [[Event(*event) for event in found[stage]] for stage in range(settings.stages)]


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()):
        yield
