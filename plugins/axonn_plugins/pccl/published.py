"""Published times of collectives at scale: `published.toml`, typed, and how far a simulated speedup is off."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from axonn_plugins.planner import files


@dataclass(frozen=True)
class Published:
    """A speedup that a text gives.

    Attributes:
        place: section and figure.
        cluster: where it was measured.
        collectives: of which it is said.
        system: the faster one.
        over: the library that was slower.
        processes: how many, from and to.
        megabytes: from and to.
        low: the least speedup.
        high: the greatest.
        more_than: whether the text says "more than `low`", and `high` is assumed.
        assumed: what the text leaves open.
    """

    place: str
    cluster: str
    collectives: tuple[str, ...]
    over: str
    processes: tuple[int, int]
    megabytes: tuple[int, int]
    low: float
    high: float
    system: str = "PCCL"
    more_than: bool = False
    assumed: str = ""

    def off(self, least: float, greatest: float) -> float:
        """The factor, at least 1, by which simulated speedups are off: the geometric mean over the range's two ends."""
        ends = math.log(least / self.low), math.log(greatest / self.high)
        if self.more_than:
            ends = max(0.0, -ends[0]), max(0.0, ends[1])
        return math.exp((abs(ends[0]) + abs(ends[1])) / 2)


def read(path: Path) -> tuple[Published, ...]:
    """The numbers of a file such as `published.toml`.

    Raises:
        ConfigError: it cannot be read, or a number lacks a key.
    """
    found = []
    for at, row in enumerate(files.read("published numbers", path).get("number", [])):
        required = ("place", "cluster", "collectives", "over", "processes", "megabytes", "low", "high")
        files.keys(f"{path.name}: number {at + 1}", row, required, ("system", "more_than", "assumed"))
        found.append(Published(**{key: _frozen(value) for key, value in row.items()}))
    return tuple(found)


def published(cluster: str) -> tuple[Published, ...]:
    """Published numbers of one cluster that come with this package."""
    return tuple(row for row in _ours() if row.cluster == cluster)


@cache
def _ours() -> tuple[Published, ...]:
    return read(Path(str(resources("axonn_plugins.pccl").joinpath("published.toml"))))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
