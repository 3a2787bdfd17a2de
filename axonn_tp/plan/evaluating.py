"""Runs of a model in evaluation mode that its training knows nothing of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from axonn_tp.layers.weight import Split

_PLAIN = (bool, int, float, str, type(None), Tensor)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, a model is in evaluation mode; behind it, all is as before that forwards note: modes, numbers, buffers, moved averages of weights."""
    kept = [
        (module, {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)})
        for module in model.modules()
        if not isinstance(module, Split)
    ]
    buffers = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    split = [module for module in model.modules() if isinstance(module, Split) and module.training]
    model.eval()
    changed = _Changed(model)
    try:
        with changed:
            yield
    finally:
        for module, values in kept:
            vars(module).update(values)
        for module, held in buffers:
            module._buffers.update(held)
        for module in split:
            module.training = True
        changed.undo()


class _Changed(TorchDispatchMode):
    """Copies of a model's parameters and buffers, of each as it was before an operation changed it in place."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._held: dict[int, list[Tensor]] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            if torch._C._has_storage(tensor):
                self._held.setdefault(_memory(tensor), []).append(tensor)
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] = MappingProxyType({})
    ) -> Any:
        """The operation, behind copies of what it changes."""
        schema = getattr(function, "_schema", None)
        if schema is not None and schema.is_mutable:
            for number, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = args[number] if number < len(args) else (kwargs or {}).get(argument.name)
                    for one in given if isinstance(given, list | tuple) else [given]:
                        self._keep(one)
        return function(*args, **(kwargs or {}))

    def _keep(self, changed: Any) -> None:
        if isinstance(changed, Tensor) and torch._C._has_storage(changed):
            for tensor in self._held.pop(_memory(changed), ()):
                self._before.append((tensor, tensor.detach().clone()))

    @torch.no_grad()
    def undo(self) -> None:
        """Give them back what they were."""
        for tensor, before in self._before:
            tensor.data.copy_(before)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
