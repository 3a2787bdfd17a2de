"""The calls of a model, watched for as long as its engine lives."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from axonn_plugins.hosts.deepspeed.replica_watch import ReplicaWatch


def watch_calls(model: nn.Module, watch: ReplicaWatch) -> Callable[[], None]:
    """Have every call of a model, and of its `forward`, compare its arguments first.

    Its class becomes a subclass of the same name, so that copies of the model are watched as well and call themselves.

    Returns:
        What undoes it, and nothing that another engine of the model has done since; it may be called again.
    """
    kind, own = type(model), vars(model).get("forward")
    original = own or kind.forward
    names = [name for name in inspect.signature(model.forward).parameters]

    active = [watch]

    def compare(inputs: tuple, keywords: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return watch.call(names, inputs, keywords) if active else (inputs, keywords)

    compare = torch.compiler.disable(compare)

    if own is not None:

        @wraps(own)
        def called(*inputs: Any, **keywords: Any) -> Any:
            inputs, keywords = compare(inputs, keywords)
            return own(*inputs, **keywords)

        model.forward = called

        def undo() -> None:
            active.clear()
            if vars(model).get("forward") is called:
                model.forward = own

        return undo

    @wraps(original)
    def forward(self: nn.Module, *inputs: Any, **keywords: Any) -> Any:
        inputs, keywords = compare(inputs, keywords)
        return original(self, *inputs, **keywords)

    same = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    watched = model.__class__ = type(kind.__name__, (kind,), {"forward": forward, **same})

    def back() -> None:
        active.clear()
        if type(model) is watched:
            model.__class__ = kind

    return back
