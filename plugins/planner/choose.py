"""A grid for a model at hand: what a start-up with ``"gx": "auto"`` asks. The model is what it sends on each grid, counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plugins.block import ConfigError
from plugins.planner.axonn import Floats, Grids, bandwidths, ranked
from plugins.planner.machine import Machine


@dataclass(frozen=True)
class Candidate:
    """A grid that divides the model and the step's samples, and what a rank sends and holds on it.

    Attributes:
        sizes: gx, gy, gz, gdata.
        sent: bytes a step by axis, of x, y, z and data.
        messages: one after another, by axis.
        state: bytes of weights, gradients and optimizer state.
    """

    sizes: tuple[int, int, int, int]
    sent: Mapping[str, float]
    messages: Mapping[str, int]
    state: float


@dataclass(frozen=True)
class Choice:
    """A grid, its seconds of collectives in a step, and bytes of state of a rank."""

    gx: int
    gy: int
    gz: int
    gdata: int
    seconds: float
    bytes: float

    def __str__(self) -> str:
        return f"gx={self.gx} gy={self.gy} gz={self.gz} gdata={self.gdata}"


def choose(machine: Machine, candidates: Sequence[Candidate]) -> list[Choice]:
    """Those that fit by the time of their collectives, equal ones with fewer and more inner axes first.

    Bandwidths are the placement-aware model's (000, section 5.1.2); each message of a ring adds the latency of the network that it crosses.

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
    """What was chosen and the runner-up, for a log."""
    first = choices[0]
    text = f"{first}, {first.seconds * 1e3:.4g} ms of collectives a step, {first.bytes / 1e9:.3g} GB of state"
    if len(choices) == 1:
        return f"{text}; the only grid that divides and fits"
    second = choices[1]
    return f"{text}; next {second}, {second.seconds * 1e3:.4g} ms; {len(choices)} grids fit"


def seconds(machine: Machine, candidates: Sequence[Candidate]) -> Floats:
    """Of the collectives of a step on each grid."""
    return np.sum(list(seconds_by_axis(machine, candidates).values()), axis=0)


def seconds_by_axis(machine: Machine, candidates: Sequence[Candidate]) -> dict[str, Floats]:
    """Of the collectives over x, y, z and data of a step on each grid."""
    at = Grids(*np.array([one.sizes for one in candidates], np.int64).T)
    beta, inner, found = bandwidths(machine, at), np.ones(len(at)), {}
    for axis, size, rate in zip(("x", "y", "z", "data"), at.axes, (beta.x, beta.y, beta.z, beta.data), strict=True):
        inner = inner * size
        latency = np.where(inner > machine.domain, machine.slow_latency, machine.fast_latency)
        sent = np.array([float(one.sent.get(axis, 0.0)) for one in candidates])
        found[axis] = sent / rate + np.array([one.messages.get(axis, 0) for one in candidates]) * latency
    return found
