"""Checkpointed functions that are computed again on the tokens that they were computed on, whatever a model was given since.

Scripts may have imported `checkpoint` under any name, so it is what all of them end in that is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import FunctionType
from typing import Any

import torch.utils.checkpoint as of_torch

from axonn_tp.comm.overlap import in_backward
from axonn_tp.context.calls import Call
from axonn_tp.context.replaced import Replaced
from axonn_tp.context.sums import computed_in, current, sharing

_MARK, _GIVEN = "axonn_on_its_tokens", "axonn_checkpoint"


@contextmanager
def on(call: Call) -> Iterator[None]:
    """Inside, what is computed is on a call's shares of tokens."""
    with sharing(call, partial(on, call)), Replaced(call):
        yield


def on_its_tokens(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is computed on the tokens of the call under way now, shares or all, also when it is called later; where there is none, on all."""
    call, context = current(), computed_in() or partial(sharing, None)

    @wraps(function, assigned=("__doc__",), updated=())
    def again(*inputs: Any, **keywords: Any) -> Any:
        if current() is call and not (in_backward() and computed_in() is None):
            return function(*inputs, **keywords)
        with context():
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


def exchange_function(checkpoint: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have a checkpoint of (function, inputs), the only such one of its module, which scripts may hold under any name, call what `wrap` makes of it."""
    among = checkpoint.__globals__
    original = among.get(_GIVEN) or FunctionType(checkpoint.__code__, among, checkpoint.__name__)

    def code(function, *inputs):  # type: ignore[no-untyped-def]
        return axonn_checkpoint(function, *inputs)  # type: ignore[name-defined]  # noqa: F821  among the module's globals

    among[_GIVEN] = lambda function, *inputs: original(wrap(function), *inputs)
    checkpoint.__code__ = code.__code__


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
