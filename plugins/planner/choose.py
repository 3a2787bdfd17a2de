"""A grid for the layers at hand: what a start-up with ``"gx": "auto"`` asks. The layers are any linears or convolutions, named or traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plugins.block import ConfigError
from plugins.planner.axonn import Grids, Linear, Repeats, bandwidths, layer_communication, ranked
from plugins.planner.machine import Machine
from plugins.planner.space import factorizations


@dataclass(frozen=True)
class Layer:
    """A layer and its rows.

    Attributes:
        linear: k features in, n out; of a convolution, k is channels times the kernel's size.
        rows: of its input for a sample: positions, or pixels.
        heads: which gx must not cut; 1 for none.
    """

    linear: Linear
    rows: int
    heads: int = 1


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


def choose(
    machine: Machine,
    layers: Sequence[Layer],
    ranks: int,
    samples: int,
    given: Mapping[str, int] | None = None,
    state: float = 16.0,
    repeats: Repeats | None = None,
) -> list[Choice]:
    """Grids by the time of their collectives, the placement-aware model, equal ones with fewer and more inner axes first.

    Args:
        machine: the networks, and the memory of a rank.
        layers: of the model.
        ranks: gx · gy · gz · gdata.
        samples: of a step, which gz · gdata divides.
        given: sizes that are not to be chosen, by gx, gy and gz.
        state: bytes of weights, gradients and optimizer a parameter; 16 in mixed precision with Adam.
        repeats: how often collectives run.

    Raises:
        ConfigError: no grid divides the layers and samples, or none fits the memory.
    """
    table = np.array(factorizations(ranks, 4), np.int64).T
    at = Grids(*table)
    fits = samples % (at.gz * at.gdata) == 0
    for name, size in (given or {}).items():
        fits &= getattr(at, name) == size
    for layer in layers:
        linear = layer.linear
        over_k, over_n = (at.gx, at.gy) if linear.transposed else (at.gy, at.gx)
        fits &= (linear.k % over_k == 0) & (linear.n % over_n == 0) & (layer.heads % at.gx == 0)
    if not fits.any():
        fixed = ", ".join(f"{name} = {size}" for name, size in (given or {}).items())
        raise ConfigError(
            f"{ranks} ranks make no grid{f' with {fixed}' if fixed else ''} that divides the features and heads of the layers, and "
            f"{samples} samples of a step; use another number of ranks or samples"
        )
    at = at.take(fits)
    parameters = float(sum(layer.linear.k * layer.linear.n for layer in layers))
    held = state * parameters / (at.gx * at.gy * at.gz)
    if not (held <= machine.memory).any():
        raise ConfigError(
            f"no grid of {ranks} ranks fits: state alone takes {held.min() / 1e9:.1f} GB of {machine.memory / 1e9:.1f}; use more ranks"
        )
    at, held = at.take(held <= machine.memory), held[held <= machine.memory]
    seconds = _seconds(machine, layers, at, samples, repeats or Repeats())
    sizes = np.stack(at.axes).T.tolist()
    return [
        Choice(sizes[i][0], sizes[i][1], sizes[i][2], sizes[i][3], float(seconds[i]), float(held[i]))
        for i in ranked(at, seconds)
    ]


def sentence(choices: Sequence[Choice]) -> str:
    """What was chosen and the runner-up, for a log."""
    first = choices[0]
    text = f"planner: {first}, {first.seconds * 1e3:.4g} ms of collectives a step, {first.bytes / 1e9:.3g} GB of state"
    if len(choices) == 1:
        return f"{text}; the only grid that divides and fits"
    second = choices[1]
    return f"{text}; next {second}, {second.seconds * 1e3:.4g} ms; {len(choices)} grids fit"


def _seconds(machine: Machine, layers: Sequence[Layer], at: Grids, samples: int, repeats: Repeats) -> np.ndarray:
    """Of all layers, equal ones computed once."""
    beta, total = bandwidths(machine, at), np.zeros(len(at))
    shapes = [(layer.linear.k, layer.linear.n, layer.linear.transposed, layer.rows) for layer in layers]
    for shape in dict.fromkeys(shapes):
        k, n, transposed, rows = shape
        m = rows * samples / at.gdata
        once = layer_communication(Linear("", k, n, transposed), m, at, beta, repeats)
        total += shapes.count(shape) * once.total
    return total
