"""Ranks that sum gradients lay them out alike: the same parameters in one order, with the same options and masks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from axonn_plugins.optim.index import Index
from axonn_plugins.optim.store import Entry

_PART = 2**14
_Fact = tuple[str, str]


def require_alike(entries: Iterable[Entry], options: Sequence[Mapping[str, Any]] = ()) -> None:
    """Refuse what would add up gradients of one parameter and of another; all ranks that sum any call it.

    Args:
        entries: as they are to be laid out.
        options: of all parameter groups, where they are compared, too.

    Raises:
        ValueError: ranks differ; on all ranks that sum the gradients which do.
    """
    sums: dict[dist.ProcessGroup, list[Entry]] = {}
    for entry in entries:
        if entry.process_group is not None and dist.get_world_size(entry.process_group) > 1:
            sums.setdefault(entry.process_group, []).append(entry)
    for group, members in sums.items():
        mine = list(_facts(members, options))
        digest = hashlib.sha256(repr(mine).encode()).hexdigest()
        if len(set(_everyone(digest, group))) > 1:
            raise ValueError(_difference(_everyone(mine, group), group))


def _everyone(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def _facts(entries: list[Entry], options: Sequence[Mapping[str, Any]]) -> Iterator[_Fact]:
    for number, entry in enumerate(entries):
        shape, kind = tuple(entry.parameter.shape), str(entry.parameter.dtype).removeprefix("torch.")
        yield f"parameter {number} of those whose gradients are summed", f"{entry.name!r} of {shape}, {kind}"
        yield f"the group of parameter {entry.name!r}", str(entry.group)
    for number in sorted({entry.group for entry in entries} if options else ()):
        yield from ((f"{key} of parameter group {number}", value) for key, value in _options(options[number]))
    for entry in entries:
        if entry.index is not None:
            yield (
                f"the mask of parameter {entry.name!r}",
                f"of {entry.kept:,} elements, number {_number(entry.index):x}",
            )


def _options(group: Mapping[str, Any]) -> Iterator[_Fact]:
    for key, value in sorted(group.items()):
        if key in ("params", "param_names"):
            continue
        if isinstance(value, Tensor):
            value = value.tolist() if value.numel() == 1 else tuple(value.shape)
        plain = value is None or isinstance(value, bool | int | float | str | tuple | list)
        yield key, repr(value) if plain else type(value).__name__


def _number(index: Index) -> int:
    """Another one for other positions, but for chance."""
    found: Any = 0
    for begin in range(0, index.kept, _PART):
        positions = index.positions(begin, min(begin + _PART, index.kept))
        found = 31 * found + (positions * positions).add_(positions).sum()
    return int(found) % 2**64


def _difference(everyone: list[list[_Fact]], group: dist.ProcessGroup) -> str:
    first = everyone[0]
    rank, other = next((rank, theirs) for rank, theirs in enumerate(everyone) if theirs != first)
    number = next(n for n in range(max(len(first), len(other))) if first[n : n + 1] != other[n : n + 1])
    what = (first[number:] or other[number:])[0][0]
    told = [
        f"{dict(facts).get(what, 'not there')} on rank {dist.get_global_rank(group, place)}"
        for place, facts in ((0, first), (rank, other))
    ]
    advice = "give all ranks whose gradients are summed the same parameters, options and masks, in one order, which a set has not"
    return f"{what} is {' and '.join(told)}; {advice}"
