"""Modules in which no trace finds a pair, and of whose structure another is in which it does: they are split alike.

Teachers and target networks are such, which the inputs at hand do not call, or without gradients: a script averages weights of the other into
theirs, shard by shard.
"""

from __future__ import annotations

from collections import Counter
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
    open_to_all, found = {*free} - taken - reasons.keys(), []
    for twin, other in _twins(model, free, taken) if taken else ():
        for group in groups:
            if all(name.startswith(f"{twin}.") for name in _names(group)):
                names = [other + name[len(twin) :] for name in _names(group)]
                if open_to_all.issuperset(names):
                    source = f"as {twin}, of the same structure"
                    found.append(replace(group, normal=tuple(names[:-1]), transposed=names[-1], source=source))
    return found if found and problem([*groups, *found]) is None else []


def _names(group: Group) -> tuple[str, ...]:
    return *group.normal, group.transposed


def _twins(model: nn.Module, free: Collection[str], taken: set[str]) -> Iterator[tuple[str, str]]:
    """Names of modules that have groups, each with one of the same structure that has none; the largest alone."""
    inside = Counter(module for name in free for module in _around(name))
    begun = {module for name in taken for module in _around(name)}
    modules = dict(model.named_modules())
    without = {name: _structure(modules[name]) for name in modules if inside[name] > 1 and name not in begun}
    known: dict[Hashable, str] = {}
    for name in modules if without else ():
        if name in begun:
            known.setdefault(_structure(modules[name]), name)
    done: set[str] = set()
    for name, structure in without.items():
        if structure in known and done.isdisjoint(_around(name)):
            done.add(name)
            yield known[structure], name


def _around(name: str) -> list[str]:
    """Names of the modules that a module is in, without the model's own."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _structure(module: nn.Module) -> Hashable:
    return tuple(
        (name, type(one), tuple((key, p.shape) for key, p in one.named_parameters(recurse=False)))
        for name, one in module.named_modules()
    )
