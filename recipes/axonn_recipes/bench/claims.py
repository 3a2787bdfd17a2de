"""A range that a benchmark's README gives for a command, beside a run of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

NAME = "claims.json"
"""A file of the ranges that a README gives: by the command's options (without those that only say how often), by quantity."""


def beside(file: Path, same: Callable[[Sequence[str]], bool], found: Mapping[str, float]) -> list[str]:
    """Each quantity of a run beside the README's range, in words; nothing where the README has no such run.

    Args:
        file: the benchmark's `NAME`.
        same: whether a command's words ask for this run.
        found: what it measured, by quantity.
    """
    for words, ranges in json.loads(file.read_text()).items():
        if same(words.split()):
            return [_line(what, found[what], *ranges[what]) for what in ranges if what in found]
    return []


def _line(what: str, value: float, low: float, high: float) -> str:
    verdict = "below" if value < low else "above" if value > high else "inside"
    return f"{what}: {value:.2f}, {verdict} the README's range, {low:.2f} to {high:.2f}"
