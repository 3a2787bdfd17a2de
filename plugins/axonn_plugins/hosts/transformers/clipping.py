"""A norm to clip by that DeepSpeed does not read, of which a run is told; without the block nothing is different."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist

from axonn_plugins.hosts.transformers.readers import has_block

_said: set[tuple[float, float]] = set()


def saying(original: Callable[..., Any]) -> Callable[..., Any]:
    """An Accelerator's ``clip_grad_norm_``, which under DeepSpeed gives the norm alone: the step was taken in ``backward``."""

    @wraps(original)
    def clip_grad_norm_(self: Any, parameters: Any, max_norm: Any, *rest: Any, **named: Any) -> Any:
        """Accelerate's own; another norm than DeepSpeed clips by is told once, on rank 0."""
        wrapped = getattr(self, "deepspeed_engine_wrapped", None)
        if wrapped is not None and has_block(self):
            _say(float(max_norm), float(wrapped.engine.gradient_clipping()))
        return original(self, parameters, max_norm, *rest, **named)

    return clip_grad_norm_


def _say(asked: float, used: float) -> None:
    if math.isinf(asked) or asked == used or (asked, used) in _said:
        return
    _said.add((asked, used))
    if dist.get_rank() == 0:
        print(
            f"axonn: gradients are {f'clipped by a norm of {used:g}' if used else 'not clipped'}, as gradient_clipping of the DeepSpeed configuration "
            f"says, and not by {asked:g}, as max_grad_norm of TrainingArguments or accelerator.clip_grad_norm_ says, which DeepSpeed does not read; "
            f'write "gradient_clipping": {asked:g} there',
            file=sys.stderr,
            flush=True,
        )
