"""Options that recipes share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from axonn_plugins.config import ConfigError


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


def part(kind: type, options: Any) -> dict[str, Any]:
    """Of options, those that are fields of a dataclass, by name."""
    return {field.name: getattr(options, field.name) for field in fields(kind)}


def add_numbers(parser: argparse.ArgumentParser, numbers: Iterable[tuple[str, int, str]]) -> None:
    """Options that take a number: name, default, what it is."""
    for name, default, text in numbers:
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default {default})")


def add_run(parser: argparse.ArgumentParser, recipe: str, dry_run: str = "say what would be run, and stop") -> None:
    """``--dry-run``, ``--name`` and ``--runs``: see `axonn_recipes.runs`.

    Args:
        parser: the recipe's.
        recipe: its name.
        dry_run: what ``--dry-run`` does.
    """
    parser.add_argument("--dry-run", action="store_true", help=dry_run)
    parser.add_argument("--name", help=f"the run's folder under runs/ (default {recipe}, {recipe}-2, ...)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs (default runs)")


def at_least_one(options: Any, *names: str) -> None:
    """Refuse numbers that are not positive.

    Args:
        options: has the numbers as attributes.
        names: of these, the options' own with underscores.

    Raises:
        ConfigError: the first.
    """
    for name in names:
        if getattr(options, name) < 1:
            raise ConfigError(
                f"--{name.replace('_', '-')} {getattr(options, name)} is not at least 1; give a positive number"
            )


def heads_fit(hidden: int, heads: int) -> None:
    """Refuse attention heads of unequal width.

    Raises:
        ConfigError: heads do not divide hidden.
    """
    if hidden % heads:
        raise ConfigError(f"--hidden {hidden} does not divide into --heads {heads}; choose a multiple")
