"""Parameters whose new values are on their way: whoever uses one waits for it.

While values are on their way a parameter is an `Arriving`: torch asks its class before every function that is given it, so that a
function of its values waits first, and one of its shape, type or gradient does not. Its module's call waits as well, for
extensions that torch does not ask for. Then it is an ``nn.Parameter`` again, and costs what that does.
"""

from __future__ import annotations

import atexit
import copy
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import eager_transforms
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

_UNDER_WAY: list[Expected] = []
_LOCK = threading.RLock()  # the backward pass may compute anew in a thread of its own
_hook: Any = None
_ALONE = 2  # tensors that have a parameter's memory: itself, and the storage in Python that is asked
_READ = "grad requires_grad shape dtype device layout is_leaf grad_fn is_cuda is_cpu is_meta"
_CALLED = "size numel nelement stride element_size __len__ __hash__ is_floating_point is_complex is_contiguous get_device requires_grad_"
_WITHOUT_VALUES = frozenset(
    {getattr(Tensor, name).__get__ for name in _READ.split()}
    | {getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")}
    | {getattr(Tensor, name).__delete__ for name in ("grad",)}
    | {getattr(Tensor, name) for name in _CALLED.split()}
    | {torch.numel, torch.is_floating_point, torch.is_complex}
)
"""Functions of a tensor that tell or set what its values do not change; not `dim`, behind which torch.func.vmap takes them without asking."""


class Arriving(nn.Parameter):
    """A parameter whose values are on their way."""

    _expected: Expected

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _WITHOUT_VALUES:
            for value in tree_leaves((args, kwargs)):
                if type(value) is Arriving:
                    value._expected.finish()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        self._expected.finish()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._expected.finish()
        return self.__reduce_ex__(protocol)


class Expected:
    """Parameters whose values come together.

    Args:
        parameters: which.
        land: waits for the values, and writes them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], land: Callable[[], None]) -> None:
        self._parameters: Sequence[Any] = parameters
        self._land = land
        device = parameters[0].device
        self._streams: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream = None if self._streams is None else self._streams.current_stream(device)

    def finish(self) -> None:
        """Wait for the values, unless that is done."""
        with _LOCK:
            if self not in _UNDER_WAY:
                return
            # The values are no part of what a transform, a mode or a graph around their user makes of them.
            with (
                torch._C.DisableTorchFunction(),
                torch._C._DisableFuncTorch(),
                _disable_current_modes(),
                torch.no_grad(),
            ):
                self._land_in_order()
            for parameter in self._parameters:
                parameter.__class__ = nn.Parameter
                del parameter._expected
            del self._land  # and what it held
            _UNDER_WAY.remove(self)
            _look_at_calls()

    def _land_in_order(self) -> None:
        """On the stream of the step, whose later work is behind it, though another one may use a value first."""
        if self._stream is None:
            self._land()
            return
        here = self._streams.current_stream(self._parameters[0].device)
        with self._streams.stream(self._stream):
            self._land()
        here.wait_stream(self._stream)


def nobody_else_reads(parameters: Sequence[Tensor]) -> bool:
    """True if values may come later: no other tensor has the memory, and nothing compiled reads it without asking."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None or _compiled():
        return False
    return all(
        type(parameter) is nn.Parameter and count(parameter.untyped_storage()._cdata) == _ALONE
        for parameter in parameters
    )


def _compiled() -> bool:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


def expect(parameters: Sequence[nn.Parameter], land: Callable[[], None]) -> Expected:
    """Have whoever uses a parameter call `land` first, once for all of them.

    Args:
        parameters: of which `nobody_else_reads`.
        land: waits for their values, and writes them.
    """
    _arm()
    one = Expected(parameters, land)
    with _LOCK:
        _UNDER_WAY.append(one)
        for parameter in parameters:
            parameter._expected = one  # type: ignore[attr-defined]
            parameter.__class__ = Arriving
        _look_at_calls()
    return one


def _look_at_calls() -> None:
    global _hook
    if _UNDER_WAY and _hook is None:
        _hook = register_module_forward_pre_hook(_called)
    elif not _UNDER_WAY and _hook is not None:
        _hook.remove()
        _hook = None


def _called(module: nn.Module, inputs: Any) -> None:
    # What torch.jit has compiled calls the modules in it without asking any.
    compiled = isinstance(module, torch.jit.ScriptModule)
    for parameter in module.parameters() if compiled else module._parameters.values():
        if type(parameter) is Arriving:
            parameter._expected.finish()


def _behind_all(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a CUDA graph, which knows of addresses alone, behind all that is on its way."""

    @wraps(function)
    def behind_all(*given: Any, **named: Any) -> Any:
        _finish_all()
        return function(*given, **named)

    return behind_all


def _finish_all() -> None:
    for one in list(_UNDER_WAY):
        one.finish()


@cache
def _arm() -> None:
    """See, once something is on its way, to those who do not ask."""
    wrap = eager_transforms._wrap_for_grad

    def wrap_for_grad(tensor: Tensor, level: int) -> Any:
        if type(tensor) is Arriving:
            tensor._expected.finish()
        return wrap(tensor, level)

    eager_transforms._wrap_for_grad = wrap_for_grad  # of torch.func's transforms of gradients
    for name in ("capture_begin", "replay"):
        setattr(torch.cuda.CUDAGraph, name, _behind_all(getattr(torch.cuda.CUDAGraph, name)))
    atexit.register(_finish_all)  # other ranks may still wait for what this one sends
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_finish_all)  # nothing arrives in a child
