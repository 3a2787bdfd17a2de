"""The best configurations of a model on a machine: all that fit, ranked by time (004, step S3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from axonn_plugins.planner.machine import Machine, calibrated
from axonn_plugins.planner.model import Transformer
from axonn_plugins.planner.schedules import SCHEDULES, parts_of
from axonn_plugins.planner.setting import Setting
from axonn_plugins.planner.space import placed, shapes
from axonn_plugins.planner.step import Candidates, Memory, Times, memory, times
from axonn_plugins.planner.transformer import Mode, Strategy


@dataclass(frozen=True)
class Plan:
    """One configuration and what it takes. Letters are the paper's, see `step.Candidates`.

    Attributes:
        seconds: of a step.
        parts: seconds by part: compute, memory, tensor, data, pipeline, bubble.
        bytes: of a GPU.
        holds: bytes by part: weights, gradients, optimizer, activations.
    """

    strategy: Strategy
    n1: int
    n2: int
    np: int
    nd: int
    bm: int
    microbatches: int
    panels: int
    v1: int
    v2: int
    vp: int
    vd: int
    seconds: float
    parts: dict[str, float]
    bytes: float
    holds: dict[str, float]

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that tell it from other plans, by letter, placement apart."""
        positions = {} if self.strategy == "1d" else {"n2": self.n2}
        panels = {"nb": self.panels} if self.strategy == "summa" else {}
        return {"n1": self.n1, **positions, "np": self.np, "nd": self.nd, "bm": self.bm, **panels}


@dataclass(frozen=True)
class GridPlan:
    """A 4D grid and what it takes; as `Plan` otherwise.

    Attributes:
        collectives: seconds of equations 5.1 to 5.5, hidden ones included.
        stages: of a pipeline, each of which has such a grid.
        sequence: ranks of z that share the positions of each sample.
    """

    gx: int
    gy: int
    gz: int
    gdata: int
    microbatches: int
    seconds: float
    parts: dict[str, float]
    bytes: float
    holds: dict[str, float]
    collectives: dict[str, float]
    stages: int = 1
    sequence: int = 1
    strategy: Literal["axonn"] = "axonn"

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that tell it from other plans, by letter."""
        more = {name: size for name in ("sequence", "stages") if (size := getattr(self, name)) > 1}
        return {
            "gx": self.gx,
            "gy": self.gy,
            "gz": self.gz,
            "gdata": self.gdata,
            **more,
            "m": self.microbatches,
        }


AnyPlan = Plan | GridPlan


@dataclass(frozen=True)
class Constraints:
    """Which configurations count.

    Attributes:
        fixed: sizes that are given, by the names of `step.Candidates`.
        least: sizes that are at least so large.
    """

    fixed: Mapping[str, int] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)

    def keep(self, at: Candidates, placement: bool = False) -> Candidates:
        """Candidates that meet the constraints; those on placement count only with `placement`."""
        mask = np.ones(len(at), bool)
        for name, size in self.fixed.items():
            if placement or not name.startswith("v"):
                mask &= getattr(at, name) == size
        for name, size in self.least.items():
            mask &= getattr(at, name) >= size
        return at.take(mask)


@dataclass(frozen=True)
class Found:
    """The plans that a search found, and the numbers of those that it tried.

    Attributes:
        best: configurations that fit, the fastest first.
        nearest: of those that do not fit, the ones that come nearest by memory, without placement and time.
        shapes: configurations before placement.
        fitting: of which fit.
        candidates: placed configurations that fit, all timed.
    """

    best: Sequence[AnyPlan]
    nearest: Sequence[AnyPlan]
    shapes: int
    fitting: int
    candidates: int


def search(
    machine: Machine,
    model: Transformer,
    strategy: Strategy,
    gpus: int,
    batch: int,
    mode: Mode = "roofline",
    top: int = 10,
    constraints: Constraints | None = None,
    setting: Setting | None = None,
) -> Found:
    """Try every configuration.

    Args:
        machine: where it runs.
        model: what is trained.
        strategy: of tensor parallelism.
        gpus: how many, all used.
        batch: samples of a step.
        mode: "paper" reproduces the published results with their defects.
        top: how many configurations are returned.
        constraints: which configurations count.
        setting: how it is trained.
    """
    machine, uneven = calibrated(machine, mode), mode == "calibrated"
    constraints, setting = constraints or Constraints(), setting or Setting()
    whole = _scheduled(constraints.keep(shapes(model, strategy, gpus, batch, uneven)), model, batch, setting, uneven)
    if not len(whole):
        return Found([], [], 0, 0, 0)
    held = memory(model, strategy, mode, whole, batch, setting)
    fits = held.total <= machine.memory
    at = constraints.keep(placed(whole.take(fits), gpus, machine.domain, uneven), placement=True)
    nearest = _smallest(whole, held, ~fits, strategy, batch, top)
    if not len(at):
        return Found([], nearest, len(whole), int(fits.sum()), 0)
    timed = times(machine, model, strategy, mode, at, batch, setting)
    order = np.argsort(timed.total, kind="stable")[:top]
    few = at.take(order)
    best = _plans(few, strategy, batch, memory(model, strategy, mode, few, batch, setting), _pick(timed, order))
    return Found(best, nearest, len(whole), int(fits.sum()), len(at))


def faster_but_too_large(
    machine: Machine,
    model: Transformer,
    strategy: Strategy,
    gpus: int,
    batch: int,
    mode: Mode,
    seconds: float,
    constraints: Constraints | None = None,
    setting: Setting | None = None,
) -> Plan | None:
    """The configuration that needs least memory of those that do not fit and take less than these seconds."""
    machine, uneven = calibrated(machine, mode), mode == "calibrated"
    constraints, setting = constraints or Constraints(), setting or Setting()
    whole = _scheduled(constraints.keep(shapes(model, strategy, gpus, batch, uneven)), model, batch, setting, uneven)
    if not len(whole):
        return None
    large = whole.take(memory(model, strategy, mode, whole, batch, setting).total > machine.memory)
    at = constraints.keep(placed(large, gpus, machine.domain, uneven), placement=True)
    if not len(at):
        return None
    timed, held = (
        times(machine, model, strategy, mode, at, batch, setting),
        memory(model, strategy, mode, at, batch, setting),
    )
    fast = np.flatnonzero(timed.total < seconds)
    if not len(fast):
        return None
    one = fast[[np.lexsort((timed.total[fast], held.total[fast]))[0]]]
    return _plans(
        at.take(one), strategy, batch, memory(model, strategy, mode, at.take(one), batch, setting), _pick(timed, one)
    )[0]


def _scheduled(at: Candidates, model: Transformer, batch: int, setting: Setting, uneven: bool) -> Candidates:
    """Candidates whose layers and microbatches are as the pipeline's schedule asks."""
    kind, parts = SCHEDULES[setting.schedule], parts_of(setting.schedule, setting.interleave)
    microbatches = batch // at.nd // at.bm
    keep = microbatches >= kind.least(at.np)
    if parts > 1:
        short = -model.layers % (at.np * parts)
        keep &= short < at.np if uneven else short == 0
    if setting.interleave > 1:
        keep &= microbatches % at.np == 0
    return at.take(keep | (at.np == 1))


def _smallest(
    whole: Candidates, held: Memory, mask: np.ndarray, strategy: Strategy, batch: int, top: int
) -> list[Plan]:
    """The configurations of a mask that need least memory, one for each split of the GPUs."""
    index = np.flatnonzero(mask)
    index = index[np.argsort(held.total[index], kind="stable")]
    splits = np.stack([whole.n1, whole.n2, whole.np, whole.nd])[:, index]
    _, first = np.unique(splits, axis=1, return_index=True)
    index = index[np.sort(first)[:top]]
    part = Memory(held.weights[index], held.gradients[index], held.optimizer[index], held.activations[index])
    return _plans(whole.take(index), strategy, batch, part, None)


def _pick(timed: Times, order: np.ndarray) -> Times:
    return Times(**{name: values[order] for name, values in vars(timed).items()})


def _plans(at: Candidates, strategy: Strategy, batch: int, held: Memory, timed: Times | None) -> list[Plan]:
    return [
        Plan(
            strategy=strategy,
            **{name: int(values[i]) for name, values in vars(at).items()},
            microbatches=int(batch // at.nd[i] // at.bm[i]),
            seconds=float(timed.total[i]) if timed else np.nan,
            parts={name: float(values[i]) for name, values in vars(timed).items()} if timed else {},
            bytes=float(held.total[i]),
            holds={name: float(values[i]) for name, values in vars(held).items()},
        )
        for i in range(len(at))
    ]
