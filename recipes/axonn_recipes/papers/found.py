"""The results of an experiment: numbers by the names that the rows have for them, and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from axonn_plugins.observe.figures import Picture
from axonn_recipes.papers.data import Value

Kind = Literal["model at the paper's scale", "measured here", "counted"]
"""The way in which numbers are obtained: from a model of the machine, by running on this one, or from sizes and formulas."""
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
class Short:
    """An experiment with fewer rounds, steps or sizes; attributes as there."""

    run: Callable[[Path], Found]
    seconds: float


@dataclass(frozen=True)
class Experiment:
    """Something that obtains numbers.

    Attributes:
        run: gets a folder for what it writes.
        kind: how it obtains them.
        seconds: what it takes, about, on two cores.
        root: whether it emulates a cluster, which needs root.
        short: its short form, where it has one.
    """

    run: Callable[[Path], Found]
    kind: Kind
    seconds: float
    root: bool = False
    short: Short | None = None

    @property
    def unasked(self) -> bool:
        """True if it is run without being named."""
        return self.seconds <= UNASKED

    def form(self, quick: bool) -> Short | Experiment:
        """The form to run: the short one where that is asked for and there is one."""
        return self.short if quick and self.short is not None else self


UNASKED = 30.0
"""Seconds of the longest experiment that is run without being named."""
