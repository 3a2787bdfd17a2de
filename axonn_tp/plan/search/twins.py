"""Modules in which no trace finds a pair, and of whose structure another is in which it does: they are split alike.

Teachers and target networks are such, which the inputs at hand do not call, or without gradients: a script averages weights of the other into
theirs, shard by shard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from axonn_tp.plan.search.pairs import Group


def twins(
    model: nn.Module,
    groups: Collection[Group],
    free: Collection[str],
    reasons: Mapping[str, str],
    problem: Callable[[list[Group]], Any],
) -> list[Group]:
    """Groups of modules that have none, as in others of their structure.

    Args:
        model: the model.
        groups: that were found.
        free: names of all linears that could be in one.
        reasons: why some are in none, which then stay so.
        problem: of all groups together; None where they are right.
    """
    taken = {name for group in groups for name in _names(group)}
    found = []
    for twin, other in _twins(model, {*free}, taken) if taken else ():
        for group in groups:
            if all(name.startswith(f"{twin}.") for name in _names(group)):
                names = [other + name[len(twin) :] for name in _names(group)]
                if {*names} <= {*free} - taken - reasons.keys():
                    source = f"as {twin}, of the same structure"
                    found.append(replace(group, normal=tuple(names[:-1]), transposed=names[-1], source=source))
    return found if found and problem([*groups, *found]) is None else []


def _names(group: Group) -> tuple[str, ...]:
    return *group.normal, group.transposed


def _twins(model: nn.Module, free: set[str], taken: set[str]) -> Iterator[tuple[str, str]]:
    """Names of modules that have groups, each with one of the same structure that has none; the largest alone."""
    known: dict[Hashable, str] = {}
    without: dict[str, Hashable] = {}
    for name, module in model.named_modules():
        inside = {linear for linear in free if linear.startswith(f"{name}.")} if name else set()
        if inside & taken:
            known.setdefault(_structure(module), name)
        elif len(inside) > 1:
            without[name] = _structure(module)
    done: list[str] = []
    for name, structure in without.items():
        if structure in known and not any(name.startswith(f"{one}.") for one in done):
            done.append(name)
            yield known[structure], name


def _structure(module: nn.Module) -> Hashable:
    return tuple(
        (name, type(one), tuple((key, p.shape) for key, p in one.named_parameters(recurse=False)))
        for name, one in module.named_modules()
    )
