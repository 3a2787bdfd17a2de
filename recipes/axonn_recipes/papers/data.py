"""The rows: each numbered table and figure, its published numbers with where they stand, and how far off is still agreement."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from axonn_plugins.config import ConfigError
from axonn_plugins.planner import files

FILE = Path(__file__).with_name("rows.toml")
WIDEST = 0.125
"""No tolerance is wider: then what agrees with a published number never agrees with one that is 30 % more or less."""
WITHOUT_CLAIM = ("diagram", "survey", "list")
"""Kinds of figures that claim nothing of the systems."""
CLAIMS = ("measured at scale", "model", "formula", "sizes", "trace", "curves", "training study", *WITHOUT_CLAIM)

Value = float | int | bool | str | list
_ROW = ("seed", "number", "caption", "claim")
_ROW_OPTIONAL = ("runs", "command", "note", "needs", "total", "numbers")
_NUMBERS = ("where", "values")
_NUMBERS_OPTIONAL = ("unit", "tolerance", "within", "needs")


@dataclass(frozen=True)
class Number:
    """A published number.

    Attributes:
        what: what it is of, as experiments name it.
        published: it; what is no number must be equal.
        unit: its unit.
        where: where in the text it stands.
        tolerance: share of it by which what is obtained may be off: zero must be met.
        within: the same in its unit; where there is one, tolerance is not read.
        needs: what nothing here obtains it without; empty where an experiment does.
    """

    what: str
    published: Value
    unit: str
    where: str
    tolerance: float
    within: float | None
    needs: str

    def agrees(self, obtained: Value) -> bool:
        """True if the obtained value is as near as the tolerance says; one that is not finite never is."""
        ours, theirs = obtained, self.published
        if isinstance(ours, bool | str | list) or isinstance(theirs, bool | str | list):
            return type(ours) is type(theirs) and ours == theirs
        allowed = self.tolerance * abs(theirs) if self.within is None else self.within
        return abs(ours - theirs) <= allowed


@dataclass(frozen=True)
class Row:
    """A numbered table or figure.

    Attributes:
        seed: the paper's leading digits.
        number: such as "Fig 4.6" or "Tab III".
        caption: what it shows, in our words.
        claim: of `CLAIMS`.
        runs: experiments that obtain its numbers, by name.
        command: what runs the same by itself.
        note: what a reader must know of the reproduction.
        needs: what of it only a machine can show, besides numbers that say so; empty where nothing is missing.
        numbers: what the text gives.
        total: the sum of its numbers as they were read from the text; those of lists count, and true as 1.
    """

    seed: str
    number: str
    caption: str
    claim: str
    runs: tuple[str, ...] = ()
    command: str = ""
    note: str = ""
    needs: str = ""
    numbers: tuple[Number, ...] = ()
    total: float = 0.0

    @property
    def name(self) -> str:
        """As users name it."""
        return f"{self.seed} {self.number}"

    @property
    def summed(self) -> float:
        """The sum of its numbers as they stand in the file."""
        each = [one.published for one in self.numbers]
        plain = [part for one in each for part in (one if isinstance(one, list) else [one])]
        return float(f"{math.fsum(part for part in plain if isinstance(part, int | float)):.14g}")

    @property
    def lacking(self) -> str:
        """The parts of it or of its numbers that only a machine can show; empty where nothing is missing."""
        return "; ".join(dict.fromkeys(filter(None, [self.needs, *(one.needs for one in self.numbers)])))

    @property
    def coverage(self) -> str:
        """The extent to which it is reproduced: full, partly, none, or n/a where it claims nothing."""
        if self.claim in WITHOUT_CLAIM:
            return "n/a"
        return "none" if not self.runs else "partly" if self.lacking else "full"


@cache
def load(file: Path = FILE) -> tuple[Row, ...]:
    """All rows of a data file.

    Raises:
        ConfigError: a key is missing or unknown, or a value not of its kind.
    """
    table = files.read("rows", file)
    files.keys(file.name, table, ("rows",), ())
    found = tuple(_row(file.name, one) for one in table["rows"])
    names = [row.name for row in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(f"{file.name} has {', '.join(sorted(twice))} more than once; keep one")
    return found


def _row(file: str, table: dict[str, Any]) -> Row:
    where = f"{file}: {table.get('seed')} {table.get('number')}"
    files.keys(where, table, _ROW, _ROW_OPTIONAL)
    if table["claim"] not in CLAIMS:
        raise ConfigError(f'{where}: claim = "{table["claim"]}" is not known; use one of {", ".join(CLAIMS)}')
    numbers = [number for group in table.get("numbers", []) for number in _numbers(where, group)]
    texts = {key: table[key] for key in (*_ROW, "command", "note", "needs") if key in table}
    total = float(table.get("total", 0.0))
    return Row(**texts, runs=tuple(table.get("runs", ())), numbers=tuple(numbers), total=total)


def _numbers(where: str, group: dict[str, Any]) -> list[Number]:
    files.keys(f"{where}: numbers", group, _NUMBERS, _NUMBERS_OPTIONAL)
    tolerance, within = group.get("tolerance", 0.1), group.get("within")
    if not 0 < tolerance <= WIDEST:
        raise ConfigError(f"{where}: tolerance = {tolerance} is not above 0 and at most {WIDEST}; narrow it")
    unit, needs = group.get("unit", ""), group.get("needs", "")
    return [
        Number(what, published, unit, group["where"], tolerance, within, needs)
        for what, published in group["values"].items()
    ]


def select(rows: Sequence[Row], only: str) -> list[Row]:
    """Rows that a text names: seeds, chapters, tables and figures, with commas between.

    Args:
        rows: to choose from.
        only: such as "000 fig 4.6", "000 chapter 4", "002", "003 table III, 003 fig 12".

    Raises:
        ConfigError: it names nothing that there is.
    """
    found: list[Row] = []
    for part in (one.strip() for one in only.split(",")):
        chosen = [row for row in rows if _named(row, part)]
        if not chosen:
            known = list(dict.fromkeys([row.name for row in rows] + [row.seed for row in rows]))
            near = difflib.get_close_matches(part.lower(), [one.lower() for one in known], n=1, cutoff=0.0)[0]
            raise ConfigError(
                f'--only = "{part}" is no seed, chapter, table or figure; use "{near}", or another of axonn train papers --list, such as '
                '"000 chapter 4", "000 fig 4.6" or "003"'
            )
        found += [row for row in chosen if row not in found]
    return found


def _named(row: Row, part: str) -> bool:
    words = part.lower().split()
    if not words or words[0] != row.seed:
        return False
    kind, number = row.number.lower().split(maxsplit=1)
    if words[1:2] == ["chapter"]:
        return len(words) == 3 and re.match(r"(\d+)\.", number) is not None and number.split(".")[0] == words[2]
    return not words[1:] or (words[1][:3] == kind[:3] and words[2:] == [number])


def by_experiment(rows: Sequence[Row]) -> Mapping[str, list[Row]]:
    """Rows that an experiment gives numbers to, in the rows' order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        for name in row.runs:
            found.setdefault(name, []).append(row)
    return found
