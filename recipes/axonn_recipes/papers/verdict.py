"""Obtained beside published: of each number, and of each row, whether they agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from axonn_recipes.papers.data import Number, Row, Value
from axonn_recipes.papers.elsewhere import elsewhere
from axonn_recipes.papers.experiments import EXPERIMENTS
from axonn_recipes.papers.found import Found

Verdict = Literal["agrees", "differs", "needs the machine", "not run"]
NO_NUMBERS = {True: "shown; the text gives no numbers", False: "nothing to compare"}


@dataclass(frozen=True)
class Compared:
    """A number, what was obtained, and the verdict.

    Attributes:
        number: as published.
        obtained: None where nothing was run.
        how: the kind of reproduction.
        verdict: whether they agree; never where another file has another number.
        contradicted: what that file has, in words.
    """

    number: Number
    obtained: Value | None
    how: str
    verdict: Verdict
    contradicted: str = ""

    @property
    def error(self) -> float | None:
        """The share by which what is obtained is off; None for what is no number."""
        theirs, ours = self.number.published, self.obtained
        plain = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (theirs, ours))
        return ours / theirs - 1 if plain and theirs else None  # type: ignore[operator]


@dataclass(frozen=True)
class Judged:
    """A row with its numbers compared, and what was run for it."""

    row: Row
    compared: Sequence[Compared]
    found: Mapping[str, Found]

    @property
    def verdict(self) -> str:
        """In words: all numbers agree, so many differ, or why there are none; another if one was changed since it was read from the text."""
        if self.row.summed != self.row.total:
            return f"differs: its numbers add up to {self.row.summed:.14g}, those that were read from the text to {self.row.total:.14g}"
        counts = {kind: sum(one.verdict == kind for one in self.compared) for kind in ("agrees", "differs", "not run")}
        known = counts["agrees"] + counts["differs"]
        left = f"; {counts['not run']} not run" if counts["not run"] else ""
        if counts["differs"]:
            return f"differs: {counts['differs']} of {known}{left}"
        if known:
            return f"agrees: {known}{left}"
        if counts["not run"] or (self.row.runs and not self.found):
            return "not run"
        return "needs the machine" if self.compared else NO_NUMBERS[bool(self.found)]

    @property
    def how(self) -> str:
        """The kinds of reproduction of what was run."""
        kinds = [EXPERIMENTS[name].kind for name in self.found]
        machine = ["needs the machine"] if self.row.lacking else []
        return ", ".join(dict.fromkeys(kinds + machine)) or "-"


def judge(row: Row, results: Mapping[str, Found]) -> Judged:
    """A row's numbers beside what experiments found.

    Args:
        row: the row.
        results: of the experiments that were run, by name.
    """
    found = {name: results[name] for name in row.runs if name in results}
    compared = []
    for number in row.numbers:
        givers = [name for name, one in found.items() if number.what in one.values]
        if givers:
            obtained, other = found[givers[0]].values[number.what], elsewhere().get(number.what)
            against = other is not None and other.contradicts(number.published)
            verdict: Verdict = "agrees" if number.agrees(obtained) and not against else "differs"
            said = f"{other.file} has {other.value:g}" if other is not None and against else ""
            compared.append(Compared(number, obtained, EXPERIMENTS[givers[0]].kind, verdict, said))
        elif number.needs:
            compared.append(Compared(number, None, "needs the machine", "needs the machine"))
        else:
            compared.append(Compared(number, None, "-", "not run"))
    return Judged(row, compared, found)


def as_json(judged: Judged) -> dict[str, Any]:
    """A row and its numbers, as what JSON can hold."""
    return {
        "row": judged.row.name,
        "caption": judged.row.caption,
        "coverage": judged.row.coverage,
        "how": judged.how,
        "verdict": judged.verdict,
        "numbers": [
            {
                "what": one.number.what,
                "published": one.number.published,
                "obtained": one.obtained,
                "unit": one.number.unit,
                "where": one.number.where,
                "error": one.error,
                "tolerance": one.number.tolerance if one.number.within is None else None,
                "within": one.number.within,
                "how": one.how,
                "verdict": one.verdict,
                "contradicted": one.contradicted,
            }
            for one in judged.compared
        ],
    }
