"""Cost of Newton–Schulz, and its deal: a matrix by one rank, or by all as a 3D product; pure functions of shapes and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from axonn_plugins.optim.whole.spread import Cut

FLOPS_PER_BYTE = 1000.0
"""Operations that a rank does while it sends one byte: an A100's 312 Tflop/s beside 300 GB/s to other GPUs, rounded."""


@dataclass(frozen=True)
class Work:
    """A matrix to orthogonalise, or several of one shape.

    Attributes:
        rows: of each.
        columns: of each.
        steps: of Newton–Schulz.
        itemsize: bytes of an element while it iterates.
        count: how many matrices.
        divisible: whether ranks may work on panels of it: sums in another order round no worse than the weights.
        family: how many ranks have it.
    """

    rows: int
    columns: int
    steps: int
    itemsize: int
    count: int = 1
    divisible: bool = False
    family: int = 1

    @property
    def short(self) -> int:
        """The shorter side, s."""
        return min(self.rows, self.columns)

    @property
    def long(self) -> int:
        """The longer side, l."""
        return max(self.rows, self.columns)


def flops(work: Work, ranks: int = 1) -> int:
    """Operations of one of so many ranks: each step is A = XXᵀ, A² and (bA + cA²)X, of which A² is every rank's."""
    panel = math.ceil(work.long / ranks)
    return work.count * work.steps * (4 * work.short**2 * panel + 2 * work.short**3)


def sum_bytes(work: Work, ranks: int) -> float:
    """Bytes that a rank sends to sum A = XXᵀ over the panels of so many ranks, all steps together, by a ring."""
    return work.count * work.steps * 2 * (ranks - 1) / ranks * work.short**2 * work.itemsize


def travel_bytes(elements: int, ranks: int, itemsize: int) -> float:
    """Bytes that a rank sends on average to bring a matrix of which each of so many ranks has an equal part to one of them, or to panels."""
    return elements * itemsize * (ranks - 1) / ranks / ranks


def panels(shape: tuple[int, int], ranks: int) -> dict[int, Cut]:
    """The panel of each rank, by place: consecutive elements of the longer side of a matrix."""
    size, rest = divmod(max(shape), ranks)
    ends = [place * size + min(place, rest) for place in range(ranks + 1)]
    spans = {place: slice(ends[place], ends[place + 1]) for place in range(ranks)}
    tall = shape[0] > shape[1]
    short = slice(0, min(shape))
    return {place: (span, short) if tall else (short, span) for place, span in spans.items() if span.stop > span.start}


@dataclass(frozen=True)
class Dealt:
    """Who does what.

    Attributes:
        owners: of each matrix, the place in its family of the rank that has it whole; None: all have a panel.
        flops: of each place, operations and, in the same measure, what sums cost it.
    """

    owners: tuple[int | None, ...]
    flops: tuple[float, ...]


def deal(works: Sequence[Work]) -> Dealt:
    """Give every matrix to a rank, or divide it, whichever has the last rank ready sooner: the largest first, each to whom it burdens least.

    Args:
        works: of the same families on all ranks; experts' families are smaller, and each has matrices like the others'.
    """
    loads = [0.0] * max((work.family for work in works), default=1)
    owners: list[int | None] = [None] * len(works)
    for number in sorted(range(len(works)), key=lambda number: -flops(works[number])):
        work = works[number]
        least = min(range(work.family), key=lambda place: loads[place])
        alone = loads[least] + flops(work)
        divided = flops(work, work.family) + FLOPS_PER_BYTE * sum_bytes(work, work.family)
        if work.divisible and work.family == len(loads) > 1 and max(loads) + divided < max(alone, *loads):
            loads = [load + divided for load in loads]
        else:
            owners[number] = least
            loads[least] = alone
    return Dealt(tuple(owners), tuple(loads))
