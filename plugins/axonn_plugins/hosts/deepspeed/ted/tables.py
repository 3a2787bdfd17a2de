"""The tables of `deepspeed.utils.groups` on experts: of the engine made last, of stock DeepSpeed again once that is gone.

The tables are DeepSpeed's for the whole process, by ep_size alone, and it never takes anything out of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from deepspeed.utils import groups as stock

_Group = dist.ProcessGroup
_TENSOR = "expert_tensor_parallel_world_size"
_TABLES = {
    "expert": (stock._EXPERT_PARALLEL_GROUP, getattr(stock, "_EXPERT_PARALLEL_GROUP_RANKS", {})),
    "expert_data": (stock._EXPERT_DATA_PARALLEL_GROUP, getattr(stock, "_EXPERT_DATA_PARALLEL_GROUP_RANKS", {})),
}
"""Groups, and their ranks, which DeepSpeed 0.16 does not keep."""
_before: dict[tuple[str, str], _Group | None] = {}
"""Entries of the tables, by axis and name, from before the first of the engines that are there."""
_tensor_before = [1]
"""The same of the ranks that split an expert."""
_entered: list[Tables] = []


@dataclass(eq=False)
class Tables:
    """Entries of the tables for one engine's experts.

    Attributes:
        name: DeepSpeed's for the groups: ep_size_N.
        groups: by axis, "expert" and "expert_data"; also those of one rank.
        tensor: ranks that split an expert.
    """

    name: str
    groups: Mapping[str, _Group]
    tensor: int

    def enter(self) -> None:
        """The engine begins."""
        if not _entered:
            _tensor_before[:] = [getattr(stock, _TENSOR)]
        for axis, (table, _) in _TABLES.items():
            known = table.get(self.name)
            if not any(known is other.groups[axis] for other in _entered):
                _before[axis, self.name] = known
        _entered.append(self)
        self._put()

    def leave(self) -> None:
        """The engine ends; nothing happens when it has already."""
        if self not in _entered:
            return
        _entered.remove(self)
        self._take_back(next((other for other in reversed(_entered) if other.name == self.name), None))
        setattr(stock, _TENSOR, _entered[-1].tensor if _entered else _tensor_before[0])

    @contextmanager
    def held(self) -> Iterator[None]:
        """For as long, the tables say this whatever another engine has put there."""
        previous = {axis: table.get(self.name) for axis, (table, _) in _TABLES.items()}
        tensor = getattr(stock, _TENSOR)
        self._put()
        try:
            yield
        finally:
            for axis, group in previous.items():
                _set(axis, self.name, group)
            setattr(stock, _TENSOR, tensor)

    def _put(self) -> None:
        for axis, group in self.groups.items():
            _set(axis, self.name, group)
        setattr(stock, _TENSOR, self.tensor)

    def _take_back(self, other: Tables | None) -> None:
        """Leave the name to another engine of ours, or to what was there; what a stock engine has put there since stays."""
        for axis, (table, _) in _TABLES.items():
            if table.get(self.name) is self.groups[axis]:
                _set(axis, self.name, _before.get((axis, self.name)) if other is None else other.groups[axis])


def step_aside() -> None:
    """A stock engine is to come, which would take groups of its own ep_size for its own."""
    for tables in reversed(_entered):
        tables._take_back(None)
    if _entered:
        setattr(stock, _TENSOR, _tensor_before[0])


def _set(axis: str, name: str, group: _Group | None) -> None:
    table, ranks = _TABLES[axis]
    if group is None:
        table.pop(name, None)
        ranks.pop(name, None)
    else:
        table[name], ranks[name] = group, dist.get_process_group_ranks(group)


def known_ranks(name: str) -> list[int] | None:
    """The ranks with this rank's experts in the layout that the tables have now, if there is one."""
    ranks: Any = _TABLES["expert_data"][1].get(name)
    return None if ranks is None else list(ranks)
