"""The size of a run, the reports of systems, and the models that all systems train."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from axonn_recipes.bench.rounds import over_ranks
from axonn_recipes.models.gpt import GPTConfig

STEPS = 3
"""Optimizer steps that are compared with the serial model's."""
STAGES = (2, 3, 4)
"""Lengths of compared pipelines, where they divide the ranks."""
EXACT = 1e-9
"""The largest relative difference in float64; sums have another order there, and nothing else differs."""
ROUNDED = 1e-5
"""Where float32 takes part: gates of experts, SAMO's kernels."""


@dataclass(frozen=True)
class Scale:
    """The size of a run.

    Attributes:
        device: "cuda", or "cpu" in a dry run.
        ranks: of all nodes.
        local: of a node.
        compared: the model that is compared with the serial one, in float64; its heads and features divide by the ranks.
        timed: the model that is timed.
        dtype: that it is timed in.
        batch: windows of a rank and timed step.
        rounds: timed steps of a side.
        sizes: bytes of timed collectives.
        parameters: at least so many in the model whose optimizer step is timed.
        copied: bytes of the vector whose copy says what memory can do.
        edge: of the largest square product that says what the device can compute.
        grids: the most grids that are compared.
    """

    device: str
    ranks: int
    local: int
    compared: GPTConfig
    timed: GPTConfig
    dtype: str
    batch: int
    rounds: int
    sizes: tuple[int, ...]
    parameters: int
    copied: int
    edge: int
    grids: int

    @property
    def place(self) -> torch.device:
        """This rank's device."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")

    @property
    def windows(self) -> int:
        """Windows of a compared step, over all ranks."""
        return 2 * self.ranks


def scale_of(device: str, tiny: bool, ranks: int, local: int, rounds: int | None) -> Scale:
    """The run's scale.

    Args:
        device: "cuda" or "cpu".
        tiny: as small as can be, where times say nothing.
        ranks: of all nodes.
        local: of a node.
        rounds: timed steps of a side; None: what is usual.
    """
    heads = _multiple(ranks, 4)
    # A pipeline has a stage a rank at most, and two parts beside the layers.
    layers = ranks - 2 if ranks > 4 and all(ranks % stages for stages in STAGES) else 2
    compared = GPTConfig(context=12, layers=layers, heads=heads, hidden=4 * heads)
    if tiny:
        model = replace(compared, context=16)
        return Scale(device, ranks, local, compared, model, "bfloat16", 1, rounds or 1, (2**12,), 5000, 2**16, 32, 4)
    heads = _multiple(ranks, 16)
    wide = GPTConfig(context=2048, layers=8, heads=heads, hidden=heads * max(2048 // heads // 8, 1) * 8)
    sizes = tuple(2**power for power in (12, 16, 20, 24, 28))
    return Scale(device, ranks, local, compared, wide, "bfloat16", 4, rounds or 10, sizes, 5 * 10**8, 2**30, 8192, 100)


def _multiple(number: int, least: int) -> int:
    """The smallest multiple of a number from `least` on."""
    return -(-least // number) * number


@dataclass(frozen=True)
class Check:
    """A number beside the serial model's.

    Attributes:
        what: is compared.
        difference: the largest relative one of all ranks; not a number where a value is not.
        allowed: the largest that rounding explains.
    """

    what: str
    difference: float
    allowed: float

    @property
    def holds(self) -> bool:
        """True if rounding explains it."""
        return self.difference <= self.allowed


@dataclass(frozen=True)
class Side:
    """A side that was timed.

    Attributes:
        name: what ran.
        ours: whether it is ours.
        seconds: of each timed step, the slowest rank's.
        memory: the most bytes that a rank's device held; None on a CPU.
    """

    name: str
    ours: bool
    seconds: list[float]
    memory: int | None = None


@dataclass(frozen=True)
class Figure:
    """A figure of a system.

    Attributes:
        name: of what.
        value: the number; None where this device does not tell.
        unit: "%" is a share of 1.
    """

    name: str
    value: float | None
    unit: str


@dataclass
class Found:
    """The report of a system; `device` is the GPU's name, None on a CPU."""

    checks: list[Check] = field(default_factory=list)
    sides: list[Side] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    device: str | None = None


def apart(found: Any, expected: Any) -> float:
    """The largest difference of two sequences or tensors, relative to the largest expected value, over all ranks."""
    mine, theirs = (torch.as_tensor(each, dtype=torch.float64).cpu() for each in (found, expected))
    if mine.shape != theirs.shape:
        raise ValueError(f"shapes differ: {tuple(mine.shape)} and {tuple(theirs.shape)}")
    difference = ((mine - theirs).abs().max() / theirs.abs().max()).item() if mine.numel() else 0.0
    told = math.inf if math.isnan(difference) else difference  # which a maximum over ranks might lose
    return over_ranks([told], dist.ReduceOp.MAX)[0]


def local_rank() -> int:
    """This rank's number on its node."""
    return int(os.environ["LOCAL_RANK"])
