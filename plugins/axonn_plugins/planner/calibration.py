"""The share of a machine's peaks that training reaches: coefficients fitted to published measurements (`fit`), in ``calibration.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

from axonn_plugins.planner import files

WITHIN = 1.2816
"""Standard deviations from the middle, between which 80 % of a normal distribution lie."""
FILE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Calibration:
    """Shares of what a machine's file says, and what its numbers leave out.

    Attributes:
        products: of the rate that a large product sustains, what products reach in training.
        fp8: of what products in 8 bits would gain by their peak, what they gain.
        attention: operations a second of fused attention, by the peak of the vector unit, which its softmax keeps busy.
        backward: how much longer an operation of products and attention takes in backward.
        passes: bytes that operations between products move, by those that each would as one kernel.
        fast: of the bandwidth within a domain.
        slow: of the bandwidth between domains.
        crowding: by which collectives between domains take longer with each doubling of the domains of their group.
        hidden: of collectives that compute may hide.
        spread: standard deviation of the logarithm of published over predicted seconds, where systems were left out of the fit.
    """

    products: float
    fp8: float
    attention: float
    backward: float
    passes: float
    fast: float
    slow: float
    crowding: float
    hidden: float
    spread: float


@cache
def ours() -> Calibration:
    """The fitted one."""
    return read(FILE)


def as_measured(tensor: float, vector: float) -> Calibration:
    """Coefficients of a machine whose file says what its ranks reach when all do the same, as CPUs' do: the cores that would hide a collective move its bytes.

    Args:
        tensor: flop/s of products, and so of attention, which is made of them there.
        vector: of all else.
    """
    ones = dict.fromkeys(("products", "fp8", "backward", "passes", "fast", "slow"), 1.0)
    return Calibration(**ones, attention=tensor / vector, crowding=0.0, hidden=0.0, spread=ours().spread)


def read(path: Path) -> Calibration:
    """A file's.

    Raises:
        ConfigError: it cannot be read, or a key is missing, unknown or wrong.
    """
    table = files.read("calibration", path)
    names = [field.name for field in fields(Calibration)]
    files.keys(path.name, table, names, ("source",))
    return Calibration(**{name: files.number(f"{path.name}: {name}", table[name]) for name in names})


def written(found: Calibration) -> str:
    """The text of its file."""
    numbers: Mapping[str, float] = asdict(found)
    return 'source = "axonn plan --validate --fit, on every second system of the corpus"\n' + "".join(
        f"{name} = {value:.4g}\n" for name, value in numbers.items()
    )
