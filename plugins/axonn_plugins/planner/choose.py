"""A grid for a model at hand: what a start-up with ``"gx": "auto"`` asks. The model is what it sends on each grid, counted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from axonn_plugins.config.base import ConfigError
from axonn_plugins.planner.axonn import Floats, Grids, bandwidths, ranked
from axonn_plugins.planner.collectives import sum_of_shares
from axonn_plugins.planner.machine import Machine, calibrated
from axonn_plugins.planner.rates import sustained
from axonn_plugins.planner.work import Number
from axonn_tp import AXES, Grid
from axonn_tp.plan.volumes import Volume


@dataclass(frozen=True)
class Candidate:
    """A grid that divides the model and the step's samples, and what a rank sends and holds on it.

    Attributes:
        sizes: gx, gy, gz, gdata.
        sent: bytes a step by axis, of x, y, z and data.
        messages: one after another, by axis.
        state: bytes of weights, gradients and optimizer state.
        scattered: of the bytes sent, those in reduce-scatters, by axis.
        flops: of a step's products, behind which collectives may hide; 0 for none.
        calls: collectives of a step.
    """

    sizes: tuple[int, int, int, int]
    sent: Mapping[str, float]
    messages: Mapping[str, int]
    state: float
    scattered: Mapping[str, float] = field(default_factory=dict)
    flops: float = 0.0
    calls: int = 0


@dataclass(frozen=True)
class Choice:
    """A grid, its seconds of collectives in a step that nothing hides, and bytes of state of a rank."""

    gx: int
    gy: int
    gz: int
    gdata: int
    seconds: float
    bytes: float

    def __str__(self) -> str:
        return f"gx={self.gx} gy={self.gy} gz={self.gz} gdata={self.gdata}"


def candidate(grid: Grid, volumes: Mapping[str, Volume], state: float, flops: float = 0.0) -> Candidate:
    """A grid that sends what `axonn_tp.plan.volumes.step_volumes` counts. What goes over several axes goes as fast as over the outermost."""
    sent: dict[str, float] = defaultdict(float)
    messages: dict[str, int] = defaultdict(int)
    scattered: dict[str, float] = defaultdict(float)
    for name, volume in volumes.items():
        axis = outermost(name, grid)
        sent[axis] += float(volume.sent)
        messages[axis] += volume.messages
        scattered[axis] += float(volume.scattered)
    calls = sum(volume.calls for volume in volumes.values())
    return Candidate((grid.gx, grid.gy, grid.gz, grid.gdata), sent, messages, state, scattered, flops, calls)


def outermost(axis: str, grid: Grid) -> str:
    """The axis itself, or of what goes over several the outermost."""
    return axis if axis in AXES else "data" if grid.gdata > 1 else "z"


def choose(machine: Machine, candidates: Sequence[Candidate]) -> list[Choice]:
    """Grids that fit, by the time of their collectives; equal ones with fewer and more inner axes first.

    Bandwidths are the placement-aware model's (000, section 5.1.2), as calibrated; each message of a ring adds the latency of the network
    that it crosses.

    Args:
        machine: the networks, and the memory of a rank.
        candidates: at least one.

    Raises:
        ConfigError: none fits the memory.
    """
    fitting = [one for one in candidates if one.state <= machine.memory]
    if not fitting:
        least = min(one.state for one in candidates)
        raise ConfigError(
            f"no grid of {np.prod(candidates[0].sizes)} ranks fits: state alone takes {least / 1e9:.1f} GB of "
            f"{machine.memory / 1e9:.1f}; use more ranks"
        )
    at = Grids(*np.array([one.sizes for one in fitting], np.int64).T)
    took = seconds(machine, fitting)
    made = []
    for i in ranked(at, took):
        gx, gy, gz, gdata = fitting[i].sizes
        made.append(Choice(gx, gy, gz, gdata, float(took[i]), fitting[i].state))
    return made


def sentence(choices: Sequence[Choice]) -> str:
    """The choice and the runner-up in a sentence, for a log."""
    first = choices[0]
    text = f"{first}, {first.seconds * 1e3:.4g} ms of collectives a step, {first.bytes / 1e9:.3g} GB of state"
    if len(choices) == 1:
        return f"{text}; the only grid that divides and fits"
    second = choices[1]
    return f"{text}; next {second}, {second.seconds * 1e3:.4g} ms; {len(choices)} grids fit"


def seconds(machine: Machine, candidates: Sequence[Candidate]) -> Floats:
    """Seconds of a step's collectives on each grid that compute does not hide.

    On GPUs, of what may run beside compute (all over z, and backward's half over x and y) the calibrated share is hidden. CPUs, whose cores
    do both, hide nothing; their rates are as measured, and so is what a call takes of a core besides its messages.
    """
    if machine.device == "cpu":
        calls = machine.call * np.array([one.calls for one in candidates])
        return calls + np.sum(list(seconds_by_axis(machine, candidates).values()), axis=0)
    machine = calibrated(machine, "calibrated")
    assert machine.calibration is not None
    took = seconds_by_axis(machine, candidates)
    beside = machine.calibration.hidden * (took["z"] + (took["x"] + took["y"]) / 2)
    compute = np.array([one.flops for one in candidates]) / (machine.calibration.products * sustained(machine))
    return np.sum(list(took.values()), axis=0) - np.minimum(beside, compute)


def seconds_by_axis(machine: Machine, candidates: Sequence[Candidate]) -> dict[str, Floats]:
    """Seconds of a step's collectives over x, y, z and data on each grid; reduce-scatters take as long as they do on this machine."""
    at = Grids(*np.array([one.sizes for one in candidates], np.int64).T)
    beta, inner, found = bandwidths(machine, at), np.ones(len(at)), {}
    for axis, size, rate in zip(("x", "y", "z", "data"), at.axes, (beta.x, beta.y, beta.z, beta.data), strict=True):
        inner = inner * size
        latency = np.where(inner > machine.domain, machine.slow_latency, machine.fast_latency)
        sent = np.array([float(one.sent.get(axis, 0.0)) for one in candidates])
        scattered = np.array([float(one.scattered.get(axis, 0.0)) for one in candidates])
        longer: Number = machine.reduce_scatter
        if axis == "z":
            longer = sum_of_shares(machine, size, np.clip(machine.domain * size // inner, 1, size))
        sent = sent + (longer - 1) * scattered
        found[axis] = sent / rate + np.array([one.messages.get(axis, 0) for one in candidates]) * latency
    return found
