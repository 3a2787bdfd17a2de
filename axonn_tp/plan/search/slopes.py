"""Functions with a backward of a model's own (`torch.autograd.Function`), of which no value of a forward tells what their gradients are made of.

Where a pass goes through one, gradients of what linears gave are compared as well: those of a share are to be its part of the whole's.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from axonn_tp.plan.search.runs import Cut, Mismatch, Run, check_same

_OTHERS = ("torch.", "axonn_tp.")
Slopes = dict[tuple[str, int], Tensor]
"""Gradients of what linears gave, by name and call."""


def own_backward(ends: Iterable[Tensor]) -> str:
    """Name of a function of a model's own that tensors went through; none, empty."""
    waiting = [end.grad_fn for end in ends if end.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        kind = getattr(type(node), "_forward_cls", None)
        if kind is not None and not kind.__module__.startswith(_OTHERS):
            return str(kind.__name__)
        new = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= new
        waiting += new
    return ""


def slopes_of(run: Run) -> Slopes | None:
    """Gradients in a whole pass, before it is settled; nothing where torch knows all of its functions."""
    ends = _ends(run)
    if not own_backward(end for _, end in ends):
        return None
    return _slopes(run, [(end, _drawn(name, end.shape)) for name, end in ends])


def check_slopes(got: Run, whole: Run, cuts: Mapping[str, Cut]) -> None:
    """Compare the gradients in a pass on a share with those in the whole one, if it has them.

    Raises:
        Mismatch: a layer's are made of a share.
    """
    if whole.slopes is None:
        return
    given = []
    for (name, end), (_, full) in zip(_ends(got), _ends(whole), strict=True):
        cut, weight = cuts.get(name), _drawn(name, full.shape)
        given.append((end, cut.of(weight) if cut is not None and cut.parts is None else weight))
    found = _slopes(got, given)
    for (name, call), expected in whole.slopes.items():
        cut = cuts.get(name)
        expected = cut.of(expected) if cut is not None and cut.parts is not None else expected
        check_same(found.get((name, call), torch.zeros_like(expected)), expected, f"the gradient of {name}")


def refuse_own_backward(run: Run, cuts: Mapping[str, Cut]) -> None:
    """Refuse a stream that goes through such a function, which might look at all features or tokens.

    Raises:
        Mismatch: there is one outside of pairs.
    """
    ends = [end for name, end in _ends(run) if (cut := cuts.get(name)) is None or cut.parts is not None]
    found = own_backward([*ends, *run.outputs])
    if found:
        raise Mismatch(f"{found} has a backward of its own")


def _ends(run: Run) -> list[tuple[str, Tensor]]:
    """Inputs of linears, with their names."""
    return [(name, tensor) for name in sorted(run.inputs) for tensor in run.inputs[name]]


def _drawn(name: str, shape: torch.Size) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _slopes(run: Run, ends: Iterable[tuple[Tensor, Tensor]]) -> Slopes:
    made = [(end, weight) for end, weight in ends if end.requires_grad]
    keys = list(_numbered(name for name, _ in run.made))
    if not made or not keys:
        return {}
    leaves = [leaf for _, leaf in run.made]
    gradients = torch.autograd.grad(
        [end for end, _ in made], leaves, [weight for _, weight in made], retain_graph=True, allow_unused=True
    )
    return {key: gradient for key, gradient in zip(keys, gradients, strict=True) if gradient is not None}


def _numbered(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    calls: Counter[str] = Counter()
    for name in names:
        yield name, calls[name]
        calls[name] += 1
