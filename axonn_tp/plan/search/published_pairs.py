"""Pairs that a model's authors publish: the ``_tp_plan`` of HF transformers, by module name, "colwise" or "rowwise".

A colwise linear gives features split as our normal layers do, a rowwise one takes them as our transposed layers do.
Other styles (packed, gathered, experts) have no such partner and are left alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class PublishedPair:
    """Normal layers, the transposed one they end in, and the heads that a split must not cut."""

    normal: tuple[str, ...]
    transposed: str
    heads: int | None


def published_pairs(
    model: nn.Module, free: Collection[str], sizes: Mapping[str, tuple[int, int]]
) -> Iterator[PublishedPair]:
    """The pairs among the linears in `free`.

    Args:
        model: the serial model, which may hold HF models anywhere.
        free: names of the linears that may be split.
        sizes: (in, out) features of each.
    """
    styles = _styles(model)
    modules = dict(model.named_modules())
    by_parent: dict[str, dict[str, list[str]]] = {}
    for name in modules:
        style = styles.get(name)
        if style in ("colwise", "rowwise"):
            by_parent.setdefault(name.rpartition(".")[0], {}).setdefault(style, []).append(name)
    for parent, layers in by_parent.items():
        normal, transposed = layers.get("colwise", []), layers.get("rowwise", [])
        if not normal or len(transposed) != 1 or not {*normal, *transposed} <= {*free}:
            continue  # what meets is split together or not at all, and one of these cannot be
        head_dim = getattr(modules[parent], "head_dim", getattr(modules[parent], "head_size", None))
        by_head = isinstance(head_dim, int)
        if by_head or "att" not in parent.rpartition(".")[2].lower():
            heads = math.gcd(*(sizes[name][1] // head_dim for name in normal)) if by_head else None  # type: ignore[operator]
            yield PublishedPair(tuple(normal), transposed[0], heads)


def _styles(model: nn.Module) -> dict[str, str]:
    """Style by module name."""
    patterns: dict[str, str] = {}
    for prefix, module in model.named_modules():
        plan = getattr(module, "_tp_plan", None)
        if not plan and hasattr(module, "layers"):
            plan = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        for pattern, style in (plan or {}).items():
            patterns.setdefault(f"{prefix}.{pattern}" if prefix else pattern, style)
    names = [name for name, _ in model.named_modules()]
    rules = [(re.compile(re.escape(pattern).replace(r"\*", r"\d+")), style) for pattern, style in patterns.items()]
    return {name: style for rule, style in reversed(rules) for name in names if rule.fullmatch(name)}
