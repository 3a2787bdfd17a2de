"""Calls just before a script's backward pass, wherever it calls autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

Call = Callable[[Any, tuple, dict[str, Any]], None]
"""Given the tensors that are differentiated, and the other arguments of autograd's engine."""
_calls: list[Call] = []


def before_backward(call: Call) -> None:
    """Have this called before each backward pass from now on, `torch.autograd.grad`'s too; harmless when called again."""
    if not _calls:
        torch.autograd._engine_run_backward = _calling(torch.autograd._engine_run_backward)
    if call not in _calls:
        _calls.append(call)


def _calling(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def run_backward(tensors: Any, *args: Any, **keywords: Any) -> Any:
        for call in _calls:
            call(tensors, args, keywords)
        return original(tensors, *args, **keywords)

    return run_backward
