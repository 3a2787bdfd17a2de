"""The step that ``AXONN_TIMELINE`` asks for: hosts say when one has ended, and what is asked for is watched and written."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from axonn_plugins.config.base import ConfigError

SWITCH, STEP = "AXONN_TIMELINE", "AXONN_TIMELINE_STEP"
_FIFTH, _BEFORE = 5, 3


def asked() -> bool:
    """True if a timeline is asked for."""
    return bool(os.environ.get(SWITCH))


def step_asked() -> int:
    """The step that is watched, counted from 1: the fifth, unless ``AXONN_TIMELINE_STEP`` names another.

    Raises:
        ConfigError: it names none, or the first, of which nobody has seen the beginning; or there is a GPU.
    """
    import torch

    if torch.cuda.is_available():
        raise ConfigError(
            f"{SWITCH} watches steps on CPUs; on GPUs use axonn.tensor_parallel.trace_steps, whose Chrome trace has them"
        )
    said = os.environ.get(STEP, str(_FIFTH))
    if not said.isdecimal() or int(said) < 2:
        raise ConfigError(
            f"{STEP}={said} is no step that can be watched; give the number of one from 2 on, counted from 1"
        )
    return int(said)


@dataclass
class _State:
    """The watch of this process.

    Attributes:
        taken: steps that ended since the process began, which is how a resumed run counts, too.
        ends: when the last ones did.
        watch: of the step that is under way.
    """

    taken: int = 0
    ends: list[float] = field(default_factory=list)
    watch: Any = None


_state = _State()


def step_ended(axes: Mapping[str, str] | None = None) -> None:
    """Say that an optimizer step has ended; every rank does, and nothing happens unless a timeline is asked for.

    Args:
        axes: axis by torch's name of its group, from `Mesh.axis_names`.

    Raises:
        ConfigError: the environment names no step that can be watched, or there is a GPU.
    """
    if not asked():
        return
    import torch.distributed as dist

    number, rank = step_asked(), dist.get_rank() if dist.is_initialized() else 0
    _state.taken += 1
    if _state.taken == number and _state.watch is not None:
        from axonn_plugins.observe.timeline.gather import bring_together
        from axonn_plugins.observe.timeline.report import FILE, write

        _state.watch.end()
        gaps = [later - earlier for earlier, later in zip(_state.ends, _state.ends[1:], strict=False)]
        kept = bring_together(_state.watch, number, statistics.median(gaps) if gaps else None)
        _state.watch = None
        if rank == 0:
            file = Path(os.environ[SWITCH]) / FILE
            write(kept, file)
            print(f"axonn: timeline of step {number}: axonn timeline {file.parent}", file=sys.stderr, flush=True)
    _state.ends = [*_state.ends[-_BEFORE:], time.perf_counter()]
    if _state.taken == number - 1:
        from axonn_plugins.observe.timeline.record import Recorder

        _state.watch = Recorder(dict(axes or {}))
        _state.watch.start_clock()


def step_begins() -> None:
    """Say that a step calls its model, if no other call has said so: modes that come and go between two steps may do so."""
    if _state.watch is not None:
        _state.watch.enter()


def before(owner: Any, name: str) -> None:
    """Have a method of a host's engine say so when a step begins; harmless when called again."""
    original = getattr(owner, name)
    if getattr(original, "begins", False):
        return

    @wraps(original)
    def method(self: Any, *args: Any, **named: Any) -> Any:
        step_begins()
        return original(self, *args, **named)

    method.begins = True  # type: ignore[attr-defined]
    setattr(owner, name, method)


def after(owner: Any, name: str) -> None:
    """Have a method of a host's engine say so when it has taken a step; harmless when called again."""
    original = getattr(owner, name)
    if getattr(original, "watched", False):
        return

    @wraps(original)
    def method(self: Any, *args: Any, **named: Any) -> Any:
        before = self.global_steps
        result = original(self, *args, **named)
        if self.global_steps != before:
            mesh = getattr(self, "mesh", None)
            step_ended(None if mesh is None else mesh.axis_names())
        return result

    method.watched = True  # type: ignore[attr-defined]
    setattr(owner, name, method)
