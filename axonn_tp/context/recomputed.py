"""Checkpointed functions that are computed again on the tokens that they were computed on, whatever a model was given since.

Scripts may have imported `checkpoint` under any name, so it is what all of them end in that is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.utils.checkpoint as of_torch

from axonn_tp.context.calls import Call
from axonn_tp.context.replaced import Replaced
from axonn_tp.context.sums import current, sharing

_MARK = "axonn_on_its_tokens"


def on_its_tokens(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is computed on the tokens of the call under way now, also when it is called later; itself where there is none."""
    call = current()
    if not isinstance(call, Call):
        return function

    @wraps(function, assigned=("__doc__",), updated=())
    def again(*inputs: Any, **keywords: Any) -> Any:
        if current() is call:
            return function(*inputs, **keywords)
        with sharing(call), Replaced(call):
            return function(*inputs, **keywords)

    return again


def exchange(kind: Any) -> None:
    """Have a reentrant checkpoint's autograd function, torch's or one made like it, know its tokens; once."""
    original = kind.forward
    if getattr(original, _MARK, False):
        return

    def forward(ctx: Any, function: Callable[..., Any], *rest: Any) -> Any:
        return original(ctx, on_its_tokens(function), *rest)

    setattr(forward, _MARK, True)
    kind.forward = staticmethod(forward)


def install() -> None:
    """Have torch's checkpoints, reentrant or not, know their tokens."""
    if getattr(of_torch, _MARK, False):
        return
    setattr(of_torch, _MARK, True)
    exchange(of_torch.CheckpointFunction)
    original = of_torch._checkpoint_without_reentrant_generator

    def generator(*given: Any, **keywords: Any) -> Any:
        return original(on_its_tokens(given[0]), *given[1:], **keywords)

    of_torch._checkpoint_without_reentrant_generator = generator
