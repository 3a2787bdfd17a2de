"""Sides that take turns, what a step of them takes, and whether they compute the same."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from axonn_plugins.config import ConfigError
from axonn_plugins.observe.progress import bar

Kind = TypeVar("Kind")


class Learner(Protocol):
    """A side that learns: its name, and the losses of its first steps."""

    @property
    def name(self) -> str:
        """As shown."""

    @property
    def losses(self) -> list[float]:
        """Losses by step."""


def in_turns(sides: Sequence[Kind], rounds: int) -> Iterator[tuple[int, Kind]]:
    """Every side once a round, with the round's number from 0, so that what drifts hits all.

    Each round has an order of its own, the same on every rank and on every run: a step depends on what the one before it left in caches and
    allocators, and nobody always comes after the same.
    """
    with bar(rounds * len(sides), "rounds", "turn") as shown:
        for number in range(rounds):
            for side in random.Random(number).sample(sides, len(sides)):
                yield number, side
                shown.update()


def seconds(step: Callable[[], object]) -> float:
    """Time a step on this rank; a GPU has then done all of it."""
    _synchronize()
    began = time.perf_counter()
    step()
    _synchronize()
    return time.perf_counter() - began


def together(step: Callable[[], object]) -> float:
    """Time a step on this rank, which all ranks begin at once."""
    dist.barrier()
    return seconds(step)


def slowest(step: Callable[[], object]) -> float:
    """Time a step, which all ranks begin at once, on the slowest of them."""
    return over_ranks([together(step)], dist.ReduceOp.MAX)[0]


def over_ranks(values: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
    """Numbers of all ranks reduced, one by one; on the current device where the group is NCCL's."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    reduced = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(reduced, op=how)
    return reduced.tolist()


def apart(losses: Sequence[float], others: Sequence[float], relative: bool = False) -> float:
    """The largest difference of two sides' losses, step by step; relative to the former's if so asked.

    Not a number where a loss is not, at whichever step.
    """
    found = [abs(a - b) / (abs(a) if relative else 1.0) for a, b in zip(losses, others, strict=True)]
    return next(filter(math.isnan, found), max(found))


def check_losses(sides: Sequence[Learner], allowed: float, relative: bool = False, advice: str = "") -> None:
    """Refuse sides that do not learn alike.

    Args:
        sides: all are compared with the first.
        allowed: difference that rounding explains.
        relative: whether it is a share of the loss.
        advice: what the user may do then.

    Raises:
        ConfigError: the first such pair.
    """
    reference = sides[0]
    for side in sides[1:]:
        difference = apart(reference.losses, side.losses, relative)
        if not difference <= allowed:
            raise ConfigError(
                f"{side.name} and {reference.name} do not compute the same: their first losses, {side.losses} and {reference.losses}, "
                f"differ by {difference:.2g}, more than {allowed:g}; nothing is reported{', ' if advice else ''}{advice}"
            )


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
