"""Layers that a model calls for some inputs and not for others: experts in a list that get no tokens, layers that are dropped.

A weight that is split over z is gathered by all ranks of z together, which read different data: where one rank calls a layer and
another does not, they would get parts of each other's weights.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from axonn_tp.plan.example_inputs import Arguments
from axonn_tp.plan.own_faults import let_out
from axonn_tp.plan.search.shadow import Shadow

_SEEDS = (1, 2, 3)


def called_at_times(shadow: Shadow, name: str, arguments: Arguments, once: set[str]) -> set[str]:
    """Linears in a module that are called in some of several runs, and those like them.

    The runs are one on these arguments, one on their first token or row, and on the same three in training, where layers may be dropped.

    Args:
        shadow: of the model.
        name: of the module.
        arguments: of the module.
        once: what was called on these arguments.
    """
    always, ever = set(once), set(once)
    for fewer in (_first_token, _first_row, lambda value: value):
        small = tree_map(fewer, arguments)
        try:
            for seed in (None, *_SEEDS):
                found = shadow.called_in(name, small, seed)
                always, ever = always & found, ever | found
            break
        except Exception as error:  # a module need not take fewer rows or tokens
            let_out(error)
    some = {_numberless(linear) for linear in ever - always}
    return {linear for linear in shadow.linears if _numberless(linear) in some}


def _numberless(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _first_row(value: Any) -> Any:
    return value[:1] if isinstance(value, Tensor) and value.dim() else value


def _first_token(value: Any) -> Any:
    tokens = isinstance(value, Tensor) and (value.dim() == 3 or (value.dim() == 2 and not value.is_floating_point()))
    return value[:1, :1] if tokens else _first_row(value)
