"""The work of each rank: train in rounds, and save at the beginning of some."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import axonn_tp
from axonn_plugins import processors
from axonn_recipes.bench.rounds import in_turns, over_ranks
from axonn_recipes.bench_checkpoint.settings import Settings
from axonn_recipes.models.gpt import GPT
from axonn_tp import Mesh, checkpoint

NONE, ASYNCHRONOUS, SYNCHRONOUS = "no checkpoint", "asynchronous", "synchronous"
ALONE = "asynchronous, no step"


@dataclass
class Side:
    """One way to train and what was measured of it; all numbers are the same on every rank.

    Attributes:
        name: shown.
        seconds: of each round, the slowest rank's, until its checkpoint is complete.
        processor: seconds of processor time of each round, all ranks and threads together.
        stopped: seconds of each round before its first step begins, the slowest rank's.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    stopped: list[float] = field(default_factory=list)


class Training:
    """A GPT whose weights the ranks share, trained by AdamW."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(1)
        self.mesh = Mesh.create(gz=settings.ranks)
        self.model = GPT(settings.model)
        axonn_tp.parallelize(self.model, self.mesh, "auto")
        self.reducer = axonn_tp.GradientReducer(self.model.parameters(), self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        windows = torch.randint(256, (settings.batch, settings.context + 1))
        self.batch = [self.mesh.shard_batch(part) for part in (windows[:, :-1], windows[:, 1:])]

    def step(self) -> None:
        """Train on the batch."""
        self.optimizer.zero_grad()
        self.model(*self.batch).backward()
        self.reducer.finish()
        self.optimizer.step()

    @property
    def bytes(self) -> int:
        """Bytes of weights and the optimizer's states on this rank."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(tensor.nbytes for tensor in [*self.model.parameters(), *states])


def measure(settings: Settings, folder: Path) -> tuple[list[Side], int]:
    """Time all sides; every rank calls it, and has the result.

    Args:
        settings: the run.
        folder: where checkpoints are written, and deleted.

    Returns:
        The sides, and the bytes of a checkpoint's tensors.
    """
    processors.share_among(settings.ranks)
    dist.init_process_group("gloo")
    training = Training(settings)
    sides = [Side(name) for name in (NONE, ASYNCHRONOUS, SYNCHRONOUS, ALONE)]
    for side in sides:
        _round(side.name, training, 1, folder / "untimed")
    for number, side in in_turns(sides, settings.rounds):
        dist.barrier()
        busy, began = time.process_time(), time.perf_counter()
        steps = 0 if side.name == ALONE else settings.every
        stopped = _round(side.name, training, steps, folder / f"{side.name} {number}")
        took = time.perf_counter() - began
        side.processor += over_ranks([time.process_time() - busy], dist.ReduceOp.SUM)
        slowest = over_ranks([took, stopped], dist.ReduceOp.MAX)
        side.seconds.append(slowest[0])
        side.stopped.append(slowest[1])
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return sides, int(over_ranks([training.bytes], dist.ReduceOp.SUM)[0])


def _round(name: str, training: Training, steps: int, folder: Path) -> float:
    """Save where the side does, and train; the seconds before the first step."""
    began = time.perf_counter()
    saving = None
    if name != NONE:
        saving = checkpoint.save(
            folder, training.model, training.mesh, training.optimizer, asynchronous=name != SYNCHRONOUS
        )
    stopped = time.perf_counter() - began
    for _ in range(steps):
        training.step()
    if saving is not None:
        saving.wait()
    return stopped
