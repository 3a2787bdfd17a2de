"""Attributes that count what is split, such as `num_heads`, hold this rank's count while their module runs.

Code between a normal layer and its transposed partner often reads widths or heads from its module instead of its
tensors. A plan names those attributes (`LayerPlan.counts`); outside of the module's forward they keep their values. So it
names the width of an argument of that forward (``x.shape[-1]``, see `axonn_tp.layers.as_share`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

from torch import nn
from torch.utils._pytree import tree_map

from axonn_tp.layers.as_share import ENDING, AsShare, argument, end, own, shaped, widths_of


def read_count(module: nn.Module, name: str) -> int | None:
    """The attribute ``name`` or ``config.name`` of a module, if it is a positive integer."""
    value: Any = module
    try:
        for part in name.split("."):
            value = getattr(value, part, None)
    except Exception:  # HF's configurations raise errors of their own for what may be another number in each layer
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def check_counts(module: nn.Module, names: Iterable[str], shares: int, layer: str, width: int) -> None:
    """Refuse counts that cannot be divided.

    Args:
        module: that holds the layer.
        names: of the counts.
        shares: into how many the layer's output is split.
        layer: its name.
        width: its input features.

    Raises:
        ValueError: names the layer, the attribute and its value.
    """
    for name in names:
        given = argument(name)
        if given and given not in [*signature(type(module).forward).parameters][1:]:
            raise ValueError(
                f"layer {layer}: counts name {name!r}, and the forward of its module {type(module).__name__} has no argument {given!r}; name one of its "
                f"arguments before {ENDING}, or an integer attribute"
            )
        count = (width or None) if given else read_count(module, name)
        if count is None or count % shares:
            found = "missing or not a positive integer" if count is None else f"{count}"
            raise ValueError(
                f"layer {layer}: counts name {name!r} of its module {type(module).__name__}, which is {found}; "
                f"name integers that {shares} divides"
            )


def divide(module: nn.Module, names: Iterable[str], shares: int) -> list[tuple[str, Any]]:
    """Set the shares' counts of a module; returns its attributes as they were."""
    before: dict[str, Any] = {}
    for name in (name for name in names if not argument(name)):
        holder: Any = module
        first, _, inner = name.partition(".")
        before.setdefault(first, getattr(module, first))
        if inner:
            # Modules share one configuration: the others go on reading the whole model's counts.
            if getattr(module, first) is before[first]:
                setattr(module, first, copy.copy(before[first]))
            holder, first = getattr(module, first), inner
        setattr(holder, first, getattr(holder, first) // shares)
    return list(before.items())


class _Counts:
    """Hooks of a module that divide its counts; a copy of the module has its own."""

    def __init__(self, names: Iterable[str], shares: Callable[[], int], width: int) -> None:
        self._names, self._shares, self._width = tuple(names), shares, width
        self._running: list[tuple[list[tuple[str, Any]], list[AsShare]]] = []

    def enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        shares = self._shares()
        args, kwargs, made = shaped(module, self._names, args, kwargs, self._width // shares)
        self._running.append((divide(module, self._names, 1 if self._running else shares), made))
        return args, kwargs

    def leave(self, module: nn.Module, inputs: tuple, output: Any) -> Any:
        before, made = self._running.pop()
        for name, value in before:
            setattr(module, name, value)
        end(made)
        return tree_map(own, output) if made else None


def count_locally(module: nn.Module, names: Iterable[str], shares: Callable[[], int], width: int = 0) -> None:
    """From now on each forward of `module` finds the named attributes divided by what `shares()` then returns.

    Calls may nest, as where a forward calls its own module again.

    Args:
        module: the module.
        names: of its counts.
        shares: divides them.
        width: input features of the layers that it holds.
    """
    counts = _Counts(names, shares, width)
    module.register_forward_pre_hook(counts.enter, prepend=True, with_kwargs=True)
    module.register_forward_hook(counts.leave, always_call=True)


def divisors(number: int) -> list[int]:
    """All divisors, largest first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)}, reverse=True)


def counting_attributes(module: nn.Module, widths: set[int], arguments: bool = True) -> list[tuple[str, ...]]:
    """Sets of attributes that may count what is split, the likeliest first; the first is empty.

    Args:
        module: the module that holds the linears.
        widths: features of those linears, in and out.
        arguments: name the width of the forward's first argument, too.
    """
    found: dict[str, tuple[list[str], list[str]]] = {}
    for prefix, holder in (("", module), ("config.", getattr(module, "config", None))):
        names = [prefix + name for name in vars(holder) if not name.startswith("_")] if holder is not None else []
        counted = [(name, count) for name in names if (count := read_count(module, name)) and count > 1]
        heads = [name for name, _ in counted if _counts_heads(name)]
        found[prefix] = heads, [name for name, count in counted if count in widths and name not in heads]
    sets: list[list[str]] = [[]]
    for heads, wide in found.values():
        sets += [heads, heads + wide, wide]
    sets.append([name for heads, wide in found.values() for name in heads + wide])
    sets += [[*names, width] for names in sets for width in (widths_of(module) if arguments else ())]
    return list(dict.fromkeys(tuple(names) for names in sets))


def _counts_heads(name: str) -> bool:
    name = name.rpartition(".")[2]
    return name in ("n_head", "n_query_groups", "num_query_groups", "h") or name.endswith("heads")
