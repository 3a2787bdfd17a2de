"""Options of optimizers, such as learning rates, that come apart on ranks which step parts or replicas of one weight.

As where a schedule goes by a loss that each rank has its own of. They are told by way of the store, in fewer and fewer steps, and in each thousandth.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_tp.comm.telling import Telling

_OFTEN = 1000
_ROUNDING = 1e-6
_Options = dict[str, dict[str, Any]]


class SameOptions:
    """Looks at the options of one optimizer, step by step."""

    def __init__(self) -> None:
        self._steps = 0
        self._tellings: dict[dist.ProcessGroup, Telling] = {}

    def look(
        self, name: str, groups: Callable[[], Iterable[dist.ProcessGroup]], options: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """The optimizer is about to step.

        Args:
            name: of its class.
            groups: finds those of ranks that step parts or replicas of one weight, the same in each step.
            options: of its parameter groups, by their numbers.

        Raises:
            ValueError: in an earlier step they were others on another rank; the same on all ranks of a group.
        """
        for telling in self._tellings.values():
            found = telling.heard()
            if found is not None:
                _compare(name, [json.loads(one) for one in found], telling.ranks)
        self._steps += 1
        if (self._steps & (self._steps - 1) and self._steps % _OFTEN) or _capturing(options):
            return
        said = json.dumps({number: _numbers(group) for number, group in options.items()})
        for group in groups():
            if group.size() > 1:
                self._tellings.setdefault(group, Telling(group, f"options of {name}")).tell(said)


def _capturing(options: Mapping[int, Mapping[str, Any]]) -> bool:
    values = (value for group in options.values() for value in group.values())
    on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in values)
    return on_gpu and torch.cuda.is_current_stream_capturing()


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    single = {key: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for key, v in group.items()}
    return {key: value for key, value in single.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_number(one) for one in value)
    return value is None or isinstance(value, bool | int | float)


def _compare(name: str, everyone: list[_Options], ranks: list[int]) -> None:
    first = everyone[0]
    for other, rank in zip(everyone, ranks, strict=True):
        for number in sorted(first.keys() & other.keys()):
            ours, theirs = first[number], other[number]
            for key in sorted(ours.keys() & theirs.keys()):
                if not _alike(ours[key], theirs[key]):
                    raise ValueError(
                        f"{name} has stepped with {key} = {ours[key]} in parameter group {number} on rank {ranks[0]} and {theirs[key]} on rank {rank}, which "
                        "have parts or replicas of one weight; where a schedule goes by a loss, as ReduceLROnPlateau does, give it the mean over all ranks "
                        "(torch.distributed.all_reduce), and go on from weights before it"
                    )


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_ROUNDING) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)
