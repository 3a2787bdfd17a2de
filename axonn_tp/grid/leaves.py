"""Tensors in what a model takes and gives, in whatever structure these lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.distributions import Distribution
from torch.utils._pytree import tree_leaves


def tensors_in(values: Any) -> list[Tensor]:
    """Tensors among nested values in their order, also of dataclasses, namespaces and distributions, which torch takes for leaves."""
    return [leaf for leaf in leaves_of(values) if isinstance(leaf, Tensor)]


def leaves_of(values: Any) -> list[Any]:
    """Leaves of nested values, those of dataclasses, namespaces and distributions in the place of these."""
    return list(_opened(values, ()))


def _opened(values: Any, within: tuple[int, ...]) -> Iterable[Any]:
    for leaf in tree_leaves(values):
        inside = None if isinstance(leaf, Tensor) or id(leaf) in within else _inside(leaf)
        if inside is None:
            yield leaf
        else:
            yield from _opened(inside, (*within, id(leaf)))


def _inside(leaf: Any) -> list[Any] | None:
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return [getattr(leaf, field.name, None) for field in fields(leaf)]
    return list(vars(leaf).values()) if isinstance(leaf, SimpleNamespace | Distribution) else None
