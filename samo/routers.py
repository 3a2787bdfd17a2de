"""Routers of mixtures of experts: matrices of few rows, each of which decides for a whole expert."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor, nn

_NAMED = re.compile(r"(^|.*_)(router|gate|gates|gating)$|^router_.*", re.IGNORECASE)
_MADE = re.compile(r"(Router|Gate|Gating)$")


def routers_in(model: nn.Module) -> list[Tensor]:
    """Parameters of routers, and of the gates of shared experts: of what is named or made as such, beside experts.

    What is beside is a child, or a parameter of its own, of a module that has another child whose name or class speaks of experts.
    So the `gate_proj` of a gated feed-forward layer is none, nor is a gate where there are no experts.
    """
    return [parameter for module in model.modules() for parameter in _beside_experts(module)]


def _beside_experts(module: nn.Module) -> Iterator[Tensor]:
    children = dict(module.named_children())
    routers = {name for name, child in children.items() if _NAMED.match(name) or _MADE.search(type(child).__name__)}
    if any(_speaks_of_experts(name, child) for name, child in children.items() if name not in routers):
        for name in routers:
            yield from children[name].parameters()
        yield from (own for name, own in module.named_parameters(recurse=False) if _NAMED.match(name))


def _speaks_of_experts(name: str, child: nn.Module) -> bool:
    return "expert" in name.lower() or "expert" in type(child).__name__.lower()
