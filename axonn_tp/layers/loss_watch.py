"""Losses that read a rank's shard of a weight, as a penalty over ``model.parameters()`` does: refused.

A shard over z is this rank's alone, and its gradient is taken for a sum over the ranks of z and divided by their number: that of a penalty would be
too small by it. Nothing but a layer's gather gives a shard a gradient otherwise, so the graph of a loss tells, where a host sees one; elsewhere
`axonn_tp.comm.shard_gradients` sees what comes of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

from torch import Tensor, nn

from axonn_tp.comm.shard_gradients import read_in_shards
from axonn_tp.layers.weight import SplitWeight

_READS = {"_DeferredBackward", "_GatheredBackward", "OwnReadBackward"}
"""Layers' own reads of shards, and of what code makes of shards to give it to a layer."""
_OURS = {*_READS, "_GatherSummedBackward", "CompiledFunctionBackward"}
_CASTS = {"ToCopyBackward0"}


class LossWatch:
    """Looks at the losses of a model, at fewer and fewer of them.

    Args:
        model: that `parallelize` has split.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)
        self._seen = 0

    def look(self, *losses: Tensor) -> None:
        """Before backward.

        Raises:
            ValueError: a weight is read in shards; the same on all ranks whose losses are made in the same way.
        """
        self._seen += 1
        model = self._model()
        if model is None or self._seen & (self._seen - 1):
            return
        name = first_read_in_shards(losses, model)
        if name is not None:
            raise ValueError(read_in_shards(name))


def first_read_in_shards(losses: Iterable[Tensor], model: nn.Module) -> str | None:
    """The first weight whose shard over z the losses read themselves; None where all go through the layers."""
    shards: dict[Any, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, SplitWeight) and module.mesh.size("z") > 1:
            for own, parameter in module.named_parameters(recurse=False):
                if module.layouts[own].over_z:
                    shards[parameter] = f"{name}.{own}" if name else own
    found: list[str] = []
    waiting = [loss.grad_fn for loss in losses if shards and loss.grad_fn is not None]
    seen: set[Any] = set(waiting)
    while waiting:
        node = waiting.pop()
        own = node.name()
        if own in _READS:
            continue
        for after, _ in node.next_functions:
            while after is not None and own not in _OURS and after.name() in _CASTS:
                after = after.next_functions[0][0]
            variable = getattr(after, "variable", None)
            if variable is not None:
                if own not in _OURS and variable in shards:
                    found.append(shards[variable])
            elif after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)
    order = list(shards.values())
    return min(found, key=order.index, default=None)
