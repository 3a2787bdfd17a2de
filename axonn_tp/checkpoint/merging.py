"""Notes of several ranks, as of stages of a pipeline, made one."""

from __future__ import annotations

from typing import Any

from axonn_tp.checkpoint.optimizer import PER_GROUP_LISTS, differ, regrouped
from axonn_tp.checkpoint.ranks import Ranks
from axonn_tp.checkpoint.state import Notes


def merged(ranks: Ranks, notes: Notes) -> Notes:
    """The first rank's notes with what the others have besides; every rank calls it, and keeps its own `extra`, which is not sent."""
    everyone = ranks.gather({part: value for part, value in notes.items() if part != "extra"})
    return {**_joined(everyone), "extra": notes["extra"]}


def _joined(everyone: list[Notes]) -> Notes:
    first = everyone[0]
    for notes in everyone[1:]:
        for part, table in notes["model"].items():
            first["model"][part] |= table
        for part in ("tensors", "others") if "optimizer" in notes else ():
            first["optimizer"][part] |= notes["optimizer"][part]
        if "optimizer" in notes:
            _join_groups(first, notes)
    return first


def _join_groups(first: Notes, notes: Notes) -> None:
    """Put the parameters of one rank's groups into those of the first that have the same options and schedule.

    A stage of a pipeline that has no parameter of a group lacks the group, so that the numbers of its others are not theirs elsewhere.
    """
    known, groups = first["optimizer"]["groups"], notes["optimizer"]["groups"]
    here, there = first.get("scheduler"), notes.get("scheduler")
    before, free = len(known), set(range(len(known)))

    def alike(place: int, number: int) -> bool:
        same = regrouped(here, [place], before) == regrouped(there, [number], len(groups))
        return same and not differ(known[place]["options"], groups[number]["options"])

    for number, group in enumerate(groups):
        places = [number, *sorted(free)] if number in free else sorted(free)
        found = next((place for place in places if alike(place, number)), None)
        if found is None:
            known.append(group)
            first["scheduler"] = _with_group(first.get("scheduler"), there, number, len(known) - 1, len(groups))
            continue
        free.remove(found)
        held = set(known[found]["params"])
        known[found]["params"] += [name for name in group["params"] if name not in held]


def _with_group(state: Any, other: Any, number: int, before: int, groups: int) -> Any:
    """A scheduler's state with one of another's groups besides.

    Args:
        state: for `before` groups.
        other: for `groups`.
        number: of the one to be added.
        before: see `state`.
        groups: see `other`.
    """
    if isinstance(state, dict):
        return {
            key: [*value, other[key][number]]
            if key in PER_GROUP_LISTS and isinstance(value, list) and len(value) == before
            else _with_group(value, other[key], number, before, groups)
            for key, value in state.items()
        }
    if isinstance(state, list) and isinstance(other, list) and len(state) == len(other):
        return [_with_group(*pair, number, before, groups) for pair in zip(state, other, strict=True)]
    return state
