"""A mixture that all ranks make alike, or none: else they would wait for each other, or route tokens in different ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from ted_moe.topology import Groups


def sizes_problem(num_experts: int, ep_size: int, overlap_degree: int, groups: Groups | None) -> str | None:
    """The sentence about sizes that do not fit."""
    if num_experts < 1 or ep_size < 1 or num_experts % ep_size:
        return f"ep_size = {ep_size} does not divide num_experts = {num_experts}; choose a divisor, so that every rank has as many"
    if groups is None and ep_size > 1:
        return f"ep_size = {ep_size} needs process groups: pass groups = Groups(Topology(...))"
    if groups is not None and groups.size("expert") != ep_size:
        return (
            f"ep_size = {ep_size}, but the topology deals experts over {groups.size('expert')} ranks; make them equal"
        )
    if overlap_degree < 1:
        return f"overlap_degree = {overlap_degree} must be at least 1, the slots all at once"
    return None


def facts_of(expert: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the facts, with their names, that ranks must have in common of the module that experts are copies of."""
    yield "expert", type(expert).__name__
    for name, one in (*expert.named_parameters(), *expert.named_buffers()):
        yield f"expert's {name}", f"of {tuple(one.shape)}, {str(one.dtype).removeprefix('torch.')}"


def require_alike(groups: Groups | None, settings: Mapping[str, Any], problem: str | None = None) -> None:
    """Go on where all ranks would; every rank of the topology calls it.

    Args:
        groups: the process groups; None: this rank alone.
        settings: numbers and words, by the names of arguments.
        problem: a sentence by which this rank must end.

    Raises:
        ValueError: it is the first rank's that has one, or says in which of the settings ranks differ; on all ranks.
    """
    if groups is None:
        if problem is not None:
            raise ValueError(problem)
        return
    everyone = [(dist.get_rank(), problem, dict(settings))]
    for axis in ("tensor", "data"):
        if groups.size(axis) > 1 and dist.get_backend(groups.group(axis)) != "fake":  # ranks that are not there
            found: list[Any] = [None] * groups.size(axis)
            dist.all_gather_object(found, everyone, group=groups.group(axis))
            everyone = [one for some in found for one in some]
    everyone.sort(key=lambda one: one[0])
    said = next((problem for _, problem, _ in everyone if problem), None)
    if said is not None:
        raise ValueError(said)
    first, _, expected = everyone[0]
    for rank, _, theirs in everyone[1:]:
        for name in dict.fromkeys((*expected, *theirs)):
            mine, other = (some.get(name, "not there") for some in (expected, theirs))
            if mine != other:
                raise ValueError(
                    f"ranks make a mixture in different ways: {name} is {mine} on rank {first} and {other} on rank {rank}; give all ranks the same"
                )
