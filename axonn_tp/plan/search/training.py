"""Buffers that a simulated pass leaves behind, and passes in training: a share must make the same of them, and in training too.

Code of a model's own may do something else in training than in evaluation, as observers and normalisations do; dropouts are left out there, whose
numbers depend on shapes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch
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
        if drawing(function, args, kwargs):
            if function in DROPOUTS:
                return args[0] if args else kwargs["input"]
            if function in ATTENTION:
                args, kwargs["dropout_p"] = args[:4], 0.0
        return function(*args, **kwargs)


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
    """True if code of a model's own, not of libraries whose layers are known, reads ``training`` anywhere."""
    kinds = {
        kind for module in model.modules() for kind in type(module).__mro__ if not kind.__module__.startswith(_KNOWN)
    }
    functions = [one for kind in kinds for one in vars(kind).values() if isinstance(one, FunctionType)]
    return any(_names_training(function.__code__) for function in functions)


def _names_training(code: CodeType) -> bool:
    return "training" in code.co_names or any(
        _names_training(one) for one in code.co_consts if isinstance(one, CodeType)
    )


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
