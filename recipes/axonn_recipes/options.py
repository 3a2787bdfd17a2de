"""Options that recipes share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

from axonn_plugins.cli.options import check_folder, read
from axonn_plugins.config import ConfigError
from axonn_tp import Grid

_MOST = 10**9


@dataclass(frozen=True, kw_only=True)
class Run:
    """Options of every run.

    Attributes:
        dry_run: say what would be run and what it needs, and stop.
        name: the run's folder under --runs; by itself the recipe's name, with a number where there is one.
        runs: folder of all runs.
    """

    dry_run: bool = False
    name: str | None = None
    runs: Path = Path("runs")

    def __post_init__(self) -> None:
        check_folder("--runs", self.runs)
        check_folder("--name", self.runs / (self.name or ""))


def part(kind: type, options: Any) -> dict[str, Any]:
    """Options that are fields of a dataclass, by name."""
    return {field.name: getattr(options, field.name) for field in fields(kind)}


class Scaled(Protocol):
    """Options that begin with the sizes of a scale."""

    @property
    def scale(self) -> str:
        """Its name."""


Kind = TypeVar("Kind", bound=Scaled)


def read_scaled(kind: type[Kind], arguments: Sequence[str], prog: str, of: Callable[[str], Kind]) -> Kind:
    """Options of a command line; what it does not give is as in the scale that it names.

    Args:
        kind: their dataclass.
        arguments: what stands behind the command.
        prog: the command.
        of: the options of a scale; of "laptop" where none is named.

    Raises:
        ConfigError: a mistake of the user's.
    """
    scale = read(kind, arguments, prog, of("laptop")).scale
    return read(kind, arguments, prog, of(scale))


def at_least_one(options: Any, *names: str) -> None:
    """Refuse numbers that are not positive, or of which nothing can be counted.

    Args:
        options: has the numbers as attributes.
        names: of these, the options' own with underscores.

    Raises:
        ConfigError: the first.
    """
    for name in names:
        if not 1 <= getattr(options, name) <= _MOST:
            wrong = "is not at least 1" if getattr(options, name) < 1 else f"is more than {_MOST:,}"
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)} {wrong}; give a positive number")


def rates_and_seed(options: Any, *rates: str) -> None:
    """Refuse learning rates that are none, and a seed that a generator does not take.

    Args:
        options: has ``seed`` and the rates as attributes.
        rates: of these, the options' own with underscores.

    Raises:
        ConfigError: the first.
    """
    for name in rates:
        if not 0 < getattr(options, name) < math.inf:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {getattr(options, name)} is not positive; give a learning rate such as 1e-3")
    if not 0 <= options.seed < 2**32:
        raise ConfigError(f"--seed {options.seed} is not from 0 and below 2**32; give such a number")


def heads_fit(hidden: int, heads: int) -> None:
    """Refuse attention heads of unequal width.

    Raises:
        ConfigError: heads do not divide hidden.
    """
    if hidden % heads:
        raise ConfigError(f"--hidden {hidden} does not divide into --heads {heads}; choose a multiple")


def grid_of(text: str) -> Grid:
    """The grid of an option: gx,gy,gz,gdata.

    Raises:
        ConfigError: it is none.
    """
    try:
        gx, gy, gz, gdata = (int(size) for size in text.split(","))
    except ValueError:
        raise ConfigError(f"--grid {text} is not four integers; write gx,gy,gz,gdata as in 2,2,2,2") from None
    try:
        return Grid(gx, gy, gz, gdata)
    except ValueError as error:
        raise ConfigError(f"--grid {text}: {error}") from None
