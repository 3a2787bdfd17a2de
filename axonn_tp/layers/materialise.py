"""A model on the meta device gets memory and initial values, module by module, so that few whole layers exist at once.

A module initialises itself by `reset_parameters()`. HF transformers do it from outside, by the model's
`_init_weights(module)`, which also rebuilds buffers such as rotary frequencies, and which a parent may use to change
its children's weights. Which call writes which tensor is found by running all of them on the meta tensors first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from axonn_tp.grid.layout import layout_of
from axonn_tp.grid.lazy import LazyTensor


class _Writes(TorchDispatchMode):
    """Storages of the tensors that are written to inside."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                self.storages.add(_storage(value))
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def _stand_ins(model: nn.Module) -> Iterator[None]:
    """Inside, tensors that are still in a file are on the meta device, where an initialisation does not change them."""
    hidden, made = list[tuple[dict[str, Any], str, LazyTensor]](), dict[int, Tensor]()
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if isinstance(tensor, LazyTensor):
                    hidden.append((table, name, tensor))
                    away = made.setdefault(id(tensor), torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
                    table[name] = nn.Parameter(away, False) if table is module._parameters else away
    try:
        yield
    finally:
        for table, name, tensor in hidden:
            table[name] = tensor


class Materialiser:
    """Fills the modules of a model, in the order of `named_modules`.

    Args:
        model: the model; one without meta tensors is left as it is.
        device: where the memory is to be.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device, self._made = device, set[int]()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._owners = _owners(model)
        self._places: dict[int, list[tuple[dict[str, Any], str]]] = {}
        self._writers: dict[int, list[nn.Module]] = {}
        self._touched: dict[int, set[int]] = {}
        if self._owners and any(t.is_meta for t in (*model.parameters(), *model.buffers())):
            with _stand_ins(model):
                self._find_writers(model)

    def _find_writers(self, model: nn.Module) -> None:
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None and tensor.is_meta:
                        self._places.setdefault(_storage(tensor), []).append((table, name))
        for module in reversed(list(model.modules())):
            owner = self._owners.get(id(module))
            if owner is None:
                continue
            with torch.random.fork_rng(devices=[]), torch.no_grad(), _Writes() as writes:
                owner._init_weights(module)
            self._touched[id(module)] = writes.storages & self._places.keys()
            for storage in self._touched[id(module)]:
                self._writers.setdefault(storage, []).append(module)

    def __call__(self, module: nn.Module) -> None:
        """Give a module's own meta tensors memory and initial values; parameters stay the same objects.

        A parameter that an earlier module owns, or a file gives, keeps its values, but `reset_parameters` runs all the same, on
        something else: the serial model drew those random numbers too, before its weights were tied or read. A module that
        lacks nothing is left alone.

        Raises:
            ValueError: nothing initialises one of its tensors.
        """
        held = {name: p for name, p in module._parameters.items() if p is not None}
        own = {name: p for name, p in held.items() if p.is_meta or id(p) in self._made}
        fresh = {name: p for name, p in own.items() if p.is_meta}
        buffers = {name: b for name, b in module._buffers.items() if b is not None and b.is_meta}
        # On the meta device, where tensors were last written to, is where they are looked up.
        storages = {_storage(tensor) for tensor in (*fresh.values(), *buffers.values())}
        if not own and not buffers:
            return
        own |= {name: p for name, p in held.items() if isinstance(p, LazyTensor)}
        for name, parameter in own.items():
            self._allocate(module, name, parameter)
        empty = {name: torch.empty_like(buffer, device=self._device) for name, buffer in buffers.items()}
        module._buffers.update(empty)
        with torch.no_grad(), _Writes() as writes:
            self._initialise(module, storages)
        # A buffer may have been replaced by one that is ready.
        left = [name for name, buffer in empty.items() if module._buffers[name] is buffer]
        unwritten = [
            name
            for name in (*fresh, *left)
            if (tensor := getattr(module, name)).numel() and _storage(tensor) not in writes.storages
        ]
        if unwritten:
            self._refuse(module, unwritten)
        module._parameters.update(own)
        self._made.update(id(parameter) for parameter in own.values())

    def _allocate(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        fresh = nn.Parameter(torch.empty(layout_of(parameter).serial_shape, dtype=parameter.dtype, device=self._device))
        if parameter.is_meta:
            fresh.requires_grad_(parameter.requires_grad)
            torch.utils.swap_tensors(parameter, fresh)
        else:
            module._parameters[name] = fresh

    def _initialise(self, module: nn.Module, storages: set[int]) -> None:
        owner = self._owners.get(id(module))
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        name = self._names[id(module)]
        writers = {id(w): w for storage in storages for w in self._writers.get(storage, [])}
        # The module itself, then those that hold it: each may set what the one before did.
        above = [
            w for w in writers.values() if w is module or f"{name}.".startswith(f"{self._names[id(w)]}.".lstrip("."))
        ]
        if owner is None or not above:
            if reset is not None:
                reset()
            return
        for writer in sorted(above, key=lambda w: -len(self._names[id(w)])):
            with self._hidden(writer, storages):
                owner._init_weights(writer)

    @contextmanager
    def _hidden(self, writer: nn.Module, storages: set[int]) -> Iterator[None]:
        """Put tensors that `writer` would write to besides out of its reach: they may be split already, or have their own turn."""
        hidden: list[tuple[dict[str, Any], str, Tensor]] = []
        for storage in self._touched[id(writer)] - storages:
            for table, name in self._places[storage]:
                tensor = table[name]
                hidden.append((table, name, tensor))
                away = torch.empty(layout_of(tensor).serial_shape, dtype=tensor.dtype, device="meta")
                table[name] = nn.Parameter(away) if isinstance(tensor, nn.Parameter) else away
        try:
            yield
        finally:
            for table, name, tensor in hidden:
                table[name] = tensor

    def _refuse(self, module: nn.Module, names: list[str]) -> None:
        raise ValueError(
            f"{type(module).__name__} {self._names[id(module)]} is on the meta device and nothing initialises its "
            f"{', '.join(names)}; add a reset_parameters() that does, or build the model on a real device"
        )


def _owners(model: nn.Module) -> dict[int, Any]:
    """For each module the HF model that initialises it: the nearest one that holds it."""
    owners: dict[int, Any] = {}
    for module in model.modules():
        if callable(getattr(module, "_init_weights", None)) and callable(getattr(module, "post_init", None)):
            owners.update((id(inside), module) for inside in module.modules())
    return owners
