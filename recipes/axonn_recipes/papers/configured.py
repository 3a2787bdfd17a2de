"""Given configurations of tensor, pipeline and data parallelism by the roofline model, also those that the planner's search leaves out.

The search asks that stages divide layers, and tensor ranks the positions of a microbatch; the papers' runs do not: here a stage has an
even share of the layers, and a rank of the positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from axonn_plugins.planner.machine import Machine
from axonn_plugins.planner.model import Transformer
from axonn_plugins.planner.setting import Setting
from axonn_plugins.planner.space import divisors, factorizations, placed
from axonn_plugins.planner.step import Candidates, memory, times

MOST_MICROBATCH = 16
Sizes = tuple[int, int, int, int]
"""Microbatch, G_intra, G_inter and G_data, as 000's Table 3.1 has them."""


@dataclass(frozen=True)
class Run:
    """A configuration, its seconds by part, and the bytes of a GPU by part."""

    sizes: Sizes
    parts: dict[str, float]
    holds: dict[str, float]

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())

    @property
    def pipelining(self) -> float:
        """Seconds without those of data parallelism."""
        return self.seconds - self.parts["data"]

    @property
    def parameters(self) -> float:
        """Parameters on the GPU."""
        return self.holds["weights"] / 2


def runs(on: Machine, of: Transformer, batch: int, given: Iterable[Sizes], setting: Setting) -> list[Run]:
    """Configurations in their best placements, the fastest first; memory is no limit, since what frameworks keep differs.

    Args:
        on: the machine.
        of: what is trained.
        batch: samples of a step.
        given: all of as many GPUs.
        setting: how it is trained.
    """
    microbatch, tensor, inter, data = np.array(list(given), np.int64).T
    one = np.ones_like(data)
    shapes = Candidates(tensor, one, inter, data, microbatch, one, one, one, one, one)
    at = placed(shapes, int(tensor[0] * inter[0] * data[0]), on.domain)
    timed = times(on, of, "1d", "roofline", at, batch, setting)
    held = memory(of, "1d", "roofline", at, batch, setting)
    best: dict[Sizes, Run] = {}
    for place in np.argsort(timed.total, kind="stable"):
        sizes = (int(at.bm[place]), int(at.n1[place]), int(at.np[place]), int(at.nd[place]))
        parts, holds = ({part: float(each[place]) for part, each in vars(whole).items()} for whole in (timed, held))
        best.setdefault(sizes, Run(sizes, parts, holds))
    return list(best.values())


def every(of: Transformer, gpus: int, batch: int, most_tensor: int, even: bool = True) -> list[Sizes]:
    """All configurations of so many GPUs whose tensor ranks divide heads, and replicas the batch.

    Args:
        of: what is trained.
        gpus: how many.
        batch: samples of a step.
        most_tensor: the largest G_intra.
        even: stages divide the layers; else there are as many as layers at most.
    """
    return [
        (microbatch, tensor, inter, data)
        for tensor, inter, data in factorizations(gpus, 3)
        if tensor <= most_tensor and of.heads % tensor == 0 and batch % data == 0
        if inter <= of.layers and (not even or of.layers % inter == 0)
        for microbatch in divisors(batch // data)
        if microbatch <= MOST_MICROBATCH
    ]
