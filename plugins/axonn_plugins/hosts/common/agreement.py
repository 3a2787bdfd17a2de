"""Agreement of all ranks on whether they can go on, and with the same settings."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.common.fingerprint import Facts

_MOST_SHOWN = 100
"""Characters of a value in a message."""


def meet(problem: str | None, facts: Facts) -> None:
    """Go on only if all ranks can, and with the same facts; every rank calls it.

    Args:
        problem: why this rank cannot.
        facts: what must be the same on all ranks.

    Raises:
        ConfigError: the same on every rank.
    """
    everyone = gather((problem, digest(facts)))
    for rank, (trouble, _) in enumerate(everyone):
        if trouble is not None:
            alone = not all(other for other, _ in everyone)
            raise ConfigError(f"rank {rank}: {trouble}" if alone else trouble)
    if len({found for _, found in everyone}) > 1:
        raise ConfigError(first_difference(dict(enumerate(gather(facts)))))


def digest(facts: Facts) -> str:
    """Digest of all facts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def first_difference(everyone: Mapping[int, Facts]) -> str:
    """The first fact that ranks do not share, with each value and its ranks, as a sentence."""
    for name in dict.fromkeys(name for facts in everyone.values() for name in facts):
        ranks_by_value: dict[str | None, list[int]] = {}
        for rank, facts in everyone.items():
            ranks_by_value.setdefault(facts.get(name), []).append(rank)
        if len(ranks_by_value) > 1:
            break
    values = list(ranks_by_value)
    told = [f"{_shown(value, values)} on {on_ranks(ranks)}" for value, ranks in ranks_by_value.items()]
    lacking = None in values and re.search(r" of (optimizer|model_parameters) group \d+$", name)
    same = "groups of parameters, with none in those that a stage lacks" if lacking else "configuration and script"
    return f"{name} is {' and '.join(told)}; start all ranks with the same {same}"


def _shown(value: str | None, values: list[str | None]) -> str:
    """A long value from where it begins to differ from the others."""
    if value is None:
        return "not there"
    if len(value) <= _MOST_SHOWN:
        return value
    others = [other or "" for other in values if other != value]
    same = min(next((at for at, (a, b) in enumerate(zip(value, other)) if a != b), len(other)) for other in others)  # noqa: B905  of unequal lengths
    start = max(0, same - _MOST_SHOWN // 2)
    return ("..." if start else "") + value[start : start + _MOST_SHOWN] + "..."


def on_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def gather(mine: Any) -> list[Any]:
    """Gather an object of every rank.

    Raises:
        ConfigError: one has ended.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(everyone, mine)
    except RuntimeError:
        raise ConfigError("another rank ended before the model was split; its own message says why") from None
    return everyone
