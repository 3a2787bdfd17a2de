"""torch's DistributedDataParallel takes all ranks for replicas, and so is refused around experts of which ranks have different ones."""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_taken: list[bool] = []
_IGNORED = "_ddp_params_and_buffers_to_ignore"


def refuse_wrapped() -> None:
    """Look at models that are wrapped from now on; harmless when called again."""
    if _taken:
        return
    _taken.append(True)
    original = DistributedDataParallel.__init__

    @wraps(original)
    def __init__(self: Any, module: nn.Module, *args: Any, **keywords: Any) -> None:  # noqa: N807
        ignored = set(getattr(module, _IGNORED, ()))
        apart = [name for name, one in module.named_parameters() if getattr(one, "ted_apart", False)]
        if not ignored.issuperset(apart):
            raise ValueError(
                f"DistributedDataParallel was given a model whose {apart[0]!r} is an expert's, of which ranks have different ones, and would send one rank's "
                "to all and take the mean of their gradients; call ted_moe.sync_gradients after backward, or GradientReducer, in its place"
            )
        original(self, module, *args, **keywords)

    DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign]
