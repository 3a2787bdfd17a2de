"""Which parameter groups of an optimizer are stepped in tiles, and which by whole matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from axonn_plugins.optim.by_parameter import reason_against
from axonn_plugins.optim.lending import require_groups
from axonn_plugins.optim.whole.rules import AsItIs, Muon, Rule
from axonn_tp import Mesh, layout_of
from axonn_tp.comm.optimizer_trial import examine, make_optimizer, require_one_by_one

Groups = list[dict[str, Any]]
_SHAPES = {
    1: ([24], [40]),
    2: ([6, 4], [5, 8]),
    3: ([2, 6, 4], [3, 5, 8]),
    4: ([6, 4, 3, 2], [5, 8, 1, 2]),
    5: ([6, 4, 3, 2, 2], [5, 8, 1, 2, 3]),
}
"""Shapes of parameters on which an optimizer is tried, by their dims."""


def make_inner(
    factory: Callable[[Groups], torch.optim.Optimizer], groups: Groups, mesh: Mesh | None
) -> tuple[torch.optim.Optimizer, dict[int, Rule]]:
    """The optimizer that steps parts of parameters.

    Args:
        factory: makes it.
        groups: with this rank's parameters.
        mesh: how these lie; None: nobody knows.

    Returns:
        The optimizer, over stand-ins of no size, and how groups that are not element-wise are stepped.

    Raises:
        ValueError: it can step neither parts of parameters nor whole ones.
    """
    stand_ins = [
        {**group, "params": [torch.zeros([0] * max((len(layout_of(p).shape) for p in group["params"]), default=1))]}
        for group in groups
    ]
    inner = make_optimizer(factory, stand_ins)
    require_groups(inner.param_groups, groups)
    inner.state.clear()
    rules: dict[int, Rule] = {}
    for number, group in enumerate(groups):
        found = _rule(inner, inner.param_groups[number], group, mesh)
        if found is not None:
            rules[number] = found
    return inner, rules


def _rule(
    inner: torch.optim.Optimizer, options: dict[str, Any], group: dict[str, Any], mesh: Mesh | None
) -> Rule | None:
    name, own = type(inner).__name__, getattr(inner, "rule_of", None)
    against = reason_against(name)
    if against is not None:
        raise ValueError(f"{name} {against}, and no rank has all of them; use an element-wise one such as AdamW")
    known = own(options) if own is not None else Muon() if type(inner) is getattr(torch.optim, "Muon", None) else None
    if known is not None and mesh is not None:
        return known
    shapes = [
        shape for dims in sorted({len(layout_of(p).shape) for p in group["params"]}) for shape in _SHAPES.get(dims, ())
    ]
    require_one_by_one(inner, options, shapes)
    try:
        kinds = {
            (p.device, torch.promote_types(p.dtype, torch.float32), len(layout_of(p).shape)) for p in group["params"]
        }
        for device, dtype, dims in kinds:
            examine(inner, options, torch.zeros([0] * max(dims, 1), device=device, dtype=dtype), {})
    except Exception:  # what of an optimizer cannot step a vector is its own affair
        if mesh is None:
            raise
        return AsItIs(inner)
    return None
