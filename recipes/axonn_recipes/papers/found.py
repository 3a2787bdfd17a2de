"""What an experiment gives: numbers by the names that the rows have for them, and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from axonn_plugins.observe.figures import Picture
from axonn_recipes.papers.data import Value

Kind = Literal["model at the paper's scale", "measured here", "counted"]
"""How numbers are obtained: from a model of the machine, by running on this one, or from sizes and formulas."""
MODEL: Kind = "model at the paper's scale"
MEASURED: Kind = "measured here"
COUNTED: Kind = "counted"


@dataclass(frozen=True)
class Found:
    """An experiment's results.

    Attributes:
        values: what was obtained, by `data.Number.what`.
        pictures: by file name.
        files: pictures that are drawn already.
        note: what a reader must know of this run.
    """

    values: Mapping[str, Value]
    pictures: Mapping[str, Picture] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Experiment:
    """Something that obtains numbers.

    Attributes:
        run: gets a folder for what it writes.
        kind: how it obtains them.
        seconds: what it takes, about, on two cores.
        root: whether it emulates a cluster, which needs root.
    """

    run: Callable[[Path], Found]
    kind: Kind
    seconds: float
    root: bool = False

    @property
    def quick(self) -> bool:
        """Whether it is run without being named."""
        return self.seconds <= QUICK


QUICK = 30.0
"""Seconds of the longest experiment of the quick set."""
