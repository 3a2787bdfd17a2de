"""Buffers that a simulated pass leaves behind, and passes in training: a share must make the same of them, and in training too.

Code of a model's own may do something else in training than in evaluation, as observers and normalisations do; dropouts are left out there, and what is
drawn is the same for each element, as the numbers depend on shapes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from axonn_tp.layers.dropout import ATTENTION, DROPOUTS, drawing
from axonn_tp.plan.search.runs import Mismatch, Run, equal

_LARGEST = 1 << 22
_KNOWN = ("torch.", "transformers.", "axonn_tp.")


class Buffers:
    """The buffers that each pass begins with.

    Args:
        model: whose they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._first = {
            f"{name}.{own}" if name else own: (module, own, buffer, buffer._version, buffer.clone())
            for name, module in model.named_modules()
            for own, buffer in module._buffers.items()
            if buffer is not None and buffer.numel() <= _LARGEST
        }

    @torch.no_grad()
    def settle(self) -> dict[str, Tensor]:
        """Buffers that the last pass changed, as it left them; they are again as they were."""
        made = {}
        for full, (module, own, buffer, version, before) in self._first.items():
            now = module._buffers.get(own)
            if now is buffer and buffer._version == version:
                continue
            if now is not None:
                made[full] = now.detach().clone()
            module._buffers[own] = kept = before.clone()
            self._first[full] = (module, own, kept, kept._version, before)
        return made


class _WithoutDropout(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in _MADE and kwargs.get("generator") is None:  # layers' answers are drawn by one
            return _without_chance(function, args, kwargs)
        if drawing(function, args, kwargs):
            if function in DROPOUTS:
                given = args[0] if args else kwargs["input"]
                # Channels are whole where the dims behind them are: another number tells that these are a share's.
                return given * (1 + 1 / math.prod(given.shape[2:])) if function in _CHANNELS else given
            if function in ATTENTION:
                args, kwargs["dropout_p"] = args[:4], 0.0
            if function in _TOLD:
                kwargs["training"] = False
            if function is F.gumbel_softmax:
                return _gumbel_softmax(*args, **kwargs)
        return function(*args, **kwargs)


_CHANNELS = {F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout}
_OF_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
_TOLD = {F.multi_head_attention_forward}
_MADE: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.rand, torch.randn, torch.rand_like, torch.randn_like), lambda *_, **__: 0.75),
    **dict.fromkeys((Tensor.exponential_, Tensor.cauchy_, Tensor.log_normal_), lambda *_, **__: 0.75),
    torch.bernoulli: lambda input, p=None, **_: input if p is None else p,
    Tensor.bernoulli: lambda input, p=None, **_: input if p is None else p,
    Tensor.bernoulli_: lambda input, p=0.5, **_: p,
    torch.poisson: lambda input, **_: input,
    Tensor.uniform_: lambda input, low=0.0, high=1.0, **named: _between(named.get("from", low), named.get("to", high)),
    Tensor.normal_: lambda input, mean=0.0, std=1.0, **_: mean + 0.75 * std,
    torch.normal: lambda mean, std=1.0, *_, **__: mean + 0.75 * std,
}
"""Functions whose numbers are each a draw of its own, and a number in the place of all, or one for each."""


def _between(low: float, high: float) -> float:
    return low + 0.75 * (high - low)


@torch.no_grad()
def _without_chance(function: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Draws that are the same for each element, so that those of a share are a part of the whole's."""
    number = torch.as_tensor(_MADE[function](*args, **kwargs)).detach().clone()
    state = torch.get_rng_state()
    made: Tensor = function(*args, **kwargs)
    torch.set_rng_state(state)
    return made.copy_(number)


def _gumbel_softmax(logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Tensor:
    soft = (logits / tau).softmax(dim)
    one = torch.zeros_like(soft).scatter_(dim, soft.argmax(dim, keepdim=True), 1.0)
    return one - soft.detach() + soft if hard else soft


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Inside, a shadow's passes are those of training, without dropout."""
    state = random.getstate()
    model.train()
    try:
        with _WithoutDropout():
            random.seed(0)
            yield
    finally:
        model.eval()
        random.setstate(state)


def asks_for_training(model: nn.Module) -> bool:
    """True if code of a model's own, not of libraries whose layers are known, reads ``training`` anywhere, hooks and functions that it calls included.

    Or if it drops whole channels.
    """
    if any(isinstance(module, _OF_CHANNELS) and module.p for module in model.modules()):
        return True
    kinds = {
        kind for module in model.modules() for kind in type(module).__mro__ if not kind.__module__.startswith(_KNOWN)
    }
    functions = [one for kind in kinds for one in vars(kind).values() if isinstance(one, FunctionType)]
    for module in model.modules():
        functions += _functions(vars(module).values())
        functions += _functions(
            hook for hooks in (module._forward_hooks, module._forward_pre_hooks) for hook in hooks.values()
        )
    seen: set[FunctionType] = set()
    return any(_asks(function, seen) for function in functions)


def _functions(values: Iterable[Any]) -> Iterator[FunctionType]:
    """Functions among values, as they are, as methods, in partial ones, and those of objects that are called."""
    for value in values:
        while isinstance(value, MethodType | partial):
            value = value.__func__ if isinstance(value, MethodType) else value.func
        called = value if isinstance(value, FunctionType) else vars(type(value)).get("__call__")
        if isinstance(called, FunctionType) and not isinstance(value, nn.Module):
            yield called


def _asks(function: FunctionType, seen: set[FunctionType]) -> bool:
    """True if a function, or one of the same package that it names, reads ``training``."""
    home = function.__module__ or ""
    if function in seen or home.startswith(_KNOWN):
        return False
    seen.add(function)
    names = set(_names(function.__code__))
    named = _functions(function.__globals__.get(name) for name in names)
    near = (one for one in named if (one.__module__ or "").partition(".")[0] == home.partition(".")[0])
    return "training" in names or any(_asks(one, seen) for one in near)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _names(one)


def check_buffers(made: Mapping[str, Tensor], run: Run) -> None:
    """Refuse a pass on a share that left other buffers behind than the whole one.

    Args:
        made: buffers that the pass changed.
        run: the whole pass.

    Raises:
        Mismatch: one is made of a share.
    """
    for name, got in made.items():
        expected = run.buffers.get(name)
        if expected is None or not equal(got, expected):
            raise Mismatch(f"the buffer {name} is made of a share")
