"""Clipping by `torch.nn.utils.clip_grad_norm_` or `clip_grad_value_`, which a script calls between backward and step: obeyed where stock DeepSpeed obeys it.

That is at ZeRO-0 in full precision, where a parameter's ``grad`` is what the step takes. With split weights each rank would clip by the norm
of its own shards; where gradients are in an optimizer of ours nothing would be clipped.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_plugins.config import ConfigError
from axonn_plugins.optim.gradients import clip_factor, squares_of
from axonn_tp.comm.clipping import clip_by

_engines: WeakSet[Any] = WeakSet()


def obey(engine: Any) -> None:
    """Have torch's functions know the parameters of an engine."""
    _engines.add(engine)
    if engine._owns:
        engine.optimizer.refuses_clipping = False
    clip_by(_clip_of_engine)


def disobey(engine: Any) -> None:
    """The engine has ended; whatever trains its parameters now is another one."""
    _engines.discard(engine)


def _clip_of_engine(parameters: list[Tensor], most: float, norm: Tensor | None, kind: float) -> bool:
    engine, called = _engine_of(parameters), f"torch.nn.utils.clip_grad_{'norm' if norm is not None else 'value'}_"
    if engine is None:
        return False
    if engine.fp16_enabled() or engine.bfloat16_enabled() or engine._own_stage or engine.zero_optimization():
        _say(called, most, engine.gradient_clipping() if norm is not None else None)
        return True
    _require_summed(engine, called)
    if not engine._owns:
        return False  # torch's own: its norm is that of the whole model (`axonn_tp.comm.clipping`)
    if norm is None:
        _clip_values(engine.optimizer, parameters, most)
    else:
        norm.copy_(_clip(engine.optimizer, parameters, most, kind))
    return True


def _engine_of(parameters: Sequence[Tensor]) -> Any:
    """The engine that trains them; None: none of ours."""
    given = {id(parameter) for parameter in parameters}
    return next((e for e in _engines if not given.isdisjoint(map(id, e.module.parameters()))), None)


def _require_summed(engine: Any, called: str) -> None:
    """Refuse gradients that are each rank's own still.

    Raises:
        ConfigError: the step's last pass has not been.
    """
    if not (engine._reduces() if engine._owns else engine._summed):
        raise ConfigError(
            f"{called} was called before the step's last engine.backward, where gradients are each rank's own; call it where "
            'engine.is_gradient_accumulation_boundary() is true, or leave it out and write "gradient_clipping" in the DeepSpeed configuration'
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
    names = _summed_names(optimizer, parameters)
    squares = squares_of(optimizer.stores, optimizer.tile_size)
    norm = optimizer.norm({name: square for name, square in squares.items() if name in names}).sqrt()
    factor = clip_factor(norm, most)
    for entry, _, part in optimizer.reduced():
        if entry.name in names:
            part.mul_(factor.to(part))
    return norm


@torch.no_grad()
def _clip_values(optimizer: Any, parameters: list[Any], most: float) -> None:
    """The same of each element; every rank calls it."""
    names = _summed_names(optimizer, parameters)
    for entry, _, part in optimizer.reduced():
        if entry.name in names:
            part.clamp_(-most, most)


def _summed_names(optimizer: Any, parameters: list[Any]) -> set[str]:
    optimizer.reducer.finish()
    return {optimizer.names[p] for p in parameters if p in optimizer.names}


_said: set[tuple[str, float]] = set()


def _say(called: str, asked: float, used: float | None) -> None:
    if asked == used or (called, asked) in _said or asked == float("inf"):
        return
    _said.add((called, asked))
    if dist.get_rank() == 0:
        print(
            f"axonn: {called} of {asked:g} changes nothing, as under DeepSpeed's ZeRO and in 16 bits, where no "
            "gradient is the parameter's; write "
            f'"gradient_clipping"{f": {asked:g}" if used is not None else ", which clips by the norm,"} in the DeepSpeed configuration',
            file=sys.stderr,
            flush=True,
        )
