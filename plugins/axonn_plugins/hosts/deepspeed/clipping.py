"""Clipping by `torch.nn.utils.clip_grad_norm_`, which a script calls between backward and step: obeyed where stock DeepSpeed obeys it.

That is at ZeRO-0 in full precision, where a parameter's ``grad`` is what the step takes. With split weights each rank would clip by the norm
of its own shards; where gradients are in an optimizer of ours nothing would be clipped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad

from axonn_plugins.config import ConfigError
from axonn_plugins.optim.gradients import clip_factor, squares_of

_engines: WeakSet[Any] = WeakSet()
_kind = 2.0
"""The type of the norm that is under way."""


def obey(engine: Any) -> None:
    """Have torch's `clip_grad_norm_` know the parameters of an engine; by whatever name a script has imported it."""
    _engines.add(engine)
    if engine._owns:
        engine.optimizer.refuses_clipping = False
    if not hasattr(clip_grad._clip_grads_with_norm_, "axonn_clips"):
        # Both are looked up by name when it runs; the first knows the type of the norm, the second the parameters.
        clip_grad._get_total_norm = _measuring(clip_grad._get_total_norm)
        clip_grad._clip_grads_with_norm_ = _clipping(clip_grad._clip_grads_with_norm_)


def disobey(engine: Any) -> None:
    """The engine has ended; whatever trains its parameters now is another one."""
    _engines.discard(engine)


def _measuring(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def get_total_norm(tensors: Any, norm_type: float = 2.0, *rest: Any, **named: Any) -> Tensor:
        """Torch's own."""
        global _kind
        _kind = float(norm_type)
        return original(tensors, norm_type, *rest, **named)

    return get_total_norm


def _clipping(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def clip_grads_with_norm_(parameters: Any, max_norm: float, total_norm: Tensor, *rest: Any, **named: Any) -> None:
        """Torch's own, or that of an engine of ours."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        engine = _engine_of(given)
        if engine is None:
            original(given, max_norm, total_norm, *rest, **named)
        elif engine.fp16_enabled() or engine.bfloat16_enabled() or engine._own_stage or engine.zero_optimization():
            _say(float(max_norm), engine.gradient_clipping())
        else:
            _require_summed(engine, float(max_norm))
            if engine._owns:
                total_norm.copy_(_clip(engine.optimizer, given, float(max_norm), _kind))
            else:  # whose norm is that of the whole model (`axonn_tp.comm.clipping`)
                original(given, max_norm, total_norm, *rest, **named)

    clip_grads_with_norm_.axonn_clips = True  # type: ignore[attr-defined]
    return clip_grads_with_norm_


def _engine_of(parameters: Sequence[Tensor]) -> Any:
    """The engine that trains them; None: none of ours."""
    given = {id(parameter) for parameter in parameters}
    return next((e for e in _engines if not given.isdisjoint(map(id, e.module.parameters()))), None)


def _require_summed(engine: Any, most: float) -> None:
    """Refuse gradients that are each rank's own still.

    Raises:
        ConfigError: the step's last pass has not been.
    """
    if not (engine._reduces() if engine._owns else engine._summed):
        raise ConfigError(
            "torch.nn.utils.clip_grad_norm_ was called before the step's last engine.backward, where gradients are each rank's own; call it where "
            f'engine.is_gradient_accumulation_boundary() is true, or leave it out and write "gradient_clipping": {most:g} in the DeepSpeed configuration'
        )


@torch.no_grad()
def _clip(optimizer: Any, parameters: list[Any], most: float, kind: float) -> Tensor:
    """Clip the sums that an optimizer of ours holds; every rank calls it.

    Raises:
        ConfigError: the norm is of another type than 2.
    """
    if kind != 2.0:
        raise ConfigError(
            f"torch.nn.utils.clip_grad_norm_ was called with norm_type = {kind:g}, and where the axonn block keeps gradients in its optimizer they are "
            "clipped by their norm of type 2; leave norm_type out"
        )
    optimizer.reducer.finish()
    names = {optimizer.names[p] for p in parameters if p in optimizer.names}
    squares = squares_of(optimizer.stores, optimizer.tile_size)
    norm = optimizer.norm({name: square for name, square in squares.items() if name in names}).sqrt()
    factor = clip_factor(norm, most)
    for entry, _, part in optimizer.reduced():
        if entry.name in names:
            part.mul_(factor.to(part))
    return norm


_said: set[float] = set()


def _say(asked: float, used: float) -> None:
    if asked == used or asked in _said or asked == float("inf"):
        return
    _said.add(asked)
    if dist.get_rank() == 0:
        print(
            f"axonn: torch.nn.utils.clip_grad_norm_ with a norm of {asked:g} changes nothing, as under DeepSpeed's ZeRO and in 16 bits, where no "
            f'gradient is the parameter\'s; write "gradient_clipping": {asked:g} in the DeepSpeed configuration',
            file=sys.stderr,
            flush=True,
        )
