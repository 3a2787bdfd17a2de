"""Models of detection and segmentation divide their losses by a number of boxes or masks, which they average over processes themselves.

Transformers takes that mean, and divides it by the number of processes once more: losses grow with the number of ranks. Here it is the mean of readers,
so that the mean of their losses is one process's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from axonn_plugins.hosts.transformers.last_batch import share
from axonn_plugins.hosts.transformers.readers import has_block

_LOSSES = "transformers.loss.loss_for_object_detection"


def count_boxes(model: nn.Module) -> None:
    """Let the files of a model, and that of transformers' losses, average over readers; harmless when called again."""
    for name in {_LOSSES, *(type(module).__module__ for module in model.modules())}:
        module: Any = sys.modules.get(name)
        state, reduce = getattr(module, "PartialState", None), getattr(module, "reduce", None)
        if isinstance(state, type) and callable(reduce) and name.startswith("transformers."):
            module.PartialState, module.reduce = _State(state), _averaging(reduce)


def _under_block() -> bool:
    from accelerate.state import AcceleratorState

    return bool(AcceleratorState._shared_state) and has_block(SimpleNamespace(state=AcceleratorState()))


class _State:
    """In the place of Accelerate's PartialState, which under the block is of one process for who asks after a mean of all."""

    def __init__(self, original: type) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __call__(self) -> Any:
        return SimpleNamespace(num_processes=1) if _under_block() else self._original()


def _averaging(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(number: Tensor, *rest: Any, **named: Any) -> Any:
        """A number of boxes in the mean over readers, for those of this reader that count; all readers call it."""
        if not _under_block():
            return original(number, *rest, **named)
        from accelerate import utils

        from axonn_plugins.hosts.transformers.accelerate_patch import same

        return utils.reduce(number, "sum") * ((share() or 1) * same() / dist.get_world_size())

    return reduce
