"""Gradients that come to shards over z past their layers, as those of a penalty over ``model.parameters()`` do: refused.

A shard over z is this rank's alone, and its gradient is taken for a sum over the ranks of z and divided by their number: that of a penalty would be
too small by it. The gradient that comes to a shard is that which gathers of layers have given, bit by bit, or something else was differentiated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import reduce
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary


class _Layer(Protocol):
    def _shard(self) -> Tensor: ...


def read_in_shards(name: str) -> str:
    """The sentence on a loss that reads a weight's shard."""
    return (
        f"the loss reads {name} outside of its layer, where a rank has nothing but its shard over z, so that the loss and its gradient would be "
        "others than in one process; read layer.weight in the model's forward, which gives the whole, or have the optimizer decay weights"
    )


class Watch:
    """Notes what gathers and layers give a leaf, by backward pass: these may run inside one another.

    Args:
        leaf: a shard, or another parameter.
    """

    def __init__(self, leaf: Tensor) -> None:
        self._leaf = ref(leaf)
        self._given: dict[int, list[Tensor]] = defaultdict(list)
        self._passed_over: set[int] = set()
        self._hook: RemovableHandle = leaf.register_hook(self._came)
        # Before hooks of the user's, which may change the gradient. The engine reads the order in which they were put in.
        hooks: dict[int, Any] = leaf._backward_hooks  # type: ignore[assignment]
        hooks.update([(key, hooks.pop(key)) for key in list(hooks) if key != self._hook.id])
        _watches[leaf] = self

    def end(self) -> None:
        """Look no longer; harmless when called again."""
        self._hook.remove()
        leaf = self._leaf()
        if leaf is not None and _watches.get(leaf) is self:
            del _watches[leaf]

    def give(self, grad: Tensor) -> None:
        """Note a gradient that a read of the leaf gives."""
        self._given[torch._C._current_graph_task_id()].append(grad)

    def pass_over(self) -> None:
        """A layer computes with something that was made of the leaf, whose gradient is then another."""
        self._passed_over.add(torch._C._current_graph_task_id())

    def _taken(self) -> list[Tensor] | None:
        """The gradients that were given in this pass; None where it is passed over."""
        task = torch._C._current_graph_task_id()
        given = self._given.pop(task, [])
        return None if task in self._passed_over else given

    def _came(self, grad: Tensor) -> Tensor | None:
        raise NotImplementedError


def is_sum(given: list[Tensor], grad: Tensor) -> bool:
    """True if a gradient is the sum of those that were given."""
    # Autograd adds in place only where nobody else, as here, holds the first.
    if len(given) == 1 and given[0] is grad:
        return True
    cast = [one.to(grad.dtype).reshape(grad.shape) for one in given]
    # Autograd may add three and more in another order.
    rounding = 0.0 if len(cast) < 3 else 8 * torch.finfo(grad.dtype).eps * max(float(one.abs().max()) for one in cast)
    return bool(cast) and torch.allclose(reduce(torch.add, cast), grad, rtol=0, atol=rounding)


class _OfShard(Watch):
    """Refuses what comes to a shard over z past its gathers."""

    def __init__(self, shard: Tensor, name: str) -> None:
        self._name = name
        super().__init__(shard)

    @torch.no_grad()
    def _came(self, grad: Tensor) -> None:
        given = self._taken()
        if given is None or (len(given) == 1 and given[0] is grad):
            return
        if grad.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # nothing may be asked of the device
        if given and not grad.isfinite().all():
            return  # an overflow: a later pass tells
        # A script may add its parameters' sum times 0, so that all are used.
        if not is_sum(given, grad) and (given or grad.any()):
            raise ValueError(read_in_shards(self._name))


_watches = WeakTensorKeyDictionary()


class ShardGradients:
    """Looks at the gradients of a model's shards, in fewer and fewer of its passes."""

    def __init__(self) -> None:
        self._passes = 0
        self._watches: list[Watch] = []

    def begin(self, layers: Iterable[_Layer]) -> None:
        """A pass begins that will be differentiated."""
        for watch in self._watches:
            watch.end()
        self._watches.clear()
        self._passes += 1
        if self._passes & (self._passes - 1):
            return
        for layer in layers:
            shard = layer._shard()
            if shard.requires_grad and shard.is_leaf and not watched(shard):
                self._watches.append(_OfShard(shard, f"{getattr(layer, 'axonn_name', type(layer).__name__)}.weight"))


def watched(leaf: Tensor) -> bool:
    """True if there is a watch on a leaf."""
    return leaf in _watches


def given(node: Any, grad: Tensor) -> Tensor:
    """Note the gradient that a function's backward gives for its first argument: a shard, or what was made of shards."""
    if not _watches:
        return grad
    first = node.next_functions[0][0]
    watch = _watch_of(first)
    if watch is not None:
        watch.give(grad)
    waiting, seen = [first], {first}
    while waiting:
        for after, _ in getattr(waiting.pop(), "next_functions", ()):
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)
                watch = _watch_of(after)
                if watch is not None:
                    watch.pass_over()
    return grad


def _watch_of(node: Any) -> Watch | None:
    leaf = getattr(node, "variable", None)
    return None if leaf is None else _watches.get(leaf)


class OwnRead(torch.autograd.Function):
    """A shard as it is, read by its layer in another way than by its block; or a parameter that is used on a share of an activation."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor) -> Tensor:
        """The shard."""
        return shard.view_as(shard)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The gradient."""
        return given(ctx, grad)
