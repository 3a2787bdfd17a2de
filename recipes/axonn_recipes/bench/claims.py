"""A range that a benchmark's README gives for a command, beside a run of it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

NAME = "claims.json"
"""A file of the ranges that a README gives: by the command's options (without those that only say how often), by quantity."""


def beside(recipe: str, resolve: Callable[[Sequence[str]], Any], run: Any, found: Mapping[str, float]) -> list[str]:
    """Each quantity of a run beside the README's range, in words; nothing where the README has no such run.

    Args:
        recipe: the path of the benchmark's module, beside which its `NAME` lies.
        resolve: makes the settings of a command's words: those of one run, or a list of several.
        run: the settings of this run, of any number of rounds.
        found: what it measured, by quantity.
    """
    for words, ranges in json.loads(Path(recipe).with_name(NAME).read_text()).items():
        asked = resolve(shlex.split(words))
        runs = asked if isinstance(asked, list) else [asked]
        if run in [replace(one, rounds=run.rounds) for one in runs]:
            return [_line(what, found[what], *ranges[what]) for what in ranges if what in found]
    return []


def _line(what: str, value: float, low: float, high: float) -> str:
    verdict = "below" if value < low else "above" if value > high else "inside"
    return f"{what}: {value:.2f}, {verdict} the README's range, {low:.2f} to {high:.2f}"
