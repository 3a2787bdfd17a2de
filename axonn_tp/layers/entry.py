"""The way of a tensor into the products that read it, once for all of them (q, k and v; gate and up).

Forward it is gathered for the first reader and handed to the others. Backward each reader adds its input gradient to
one sum; the last one starts the sum's reduction (Algorithm 3, line 12) and computes its weight's gradient meanwhile.
A reader that is called with another tensor than the one before enters it by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from axonn_tp.comm.collectives import Pending, copy_to, gather_to, reduce_from, scatter_from, start_all_gather
from axonn_tp.grid.mesh import Mesh
from axonn_tp.layers.product import Operation, Route, Weight, start_scatter


class _Pass:
    """The parts of a tensor that one backward pass has so far."""

    def __init__(self, task: int) -> None:
        self.task, self.given, self.left = task, 0, 0
        self.total: Tensor | None = None
        self.reduction: Pending | None = None
        self.reduced: Tensor | None = None
        self.gather: Pending | None = None
        self.whole: Tensor | None = None


class Entry:
    """One tensor among its readers.

    Args:
        share: the tensor as it came.
        route: how it came.
        layer: the first reader.
        tokens: how many the gathered tensor has, where tokens are scattered; with the padding when None.

    Attributes:
        readers: how many products have read it.
    """

    def __init__(self, share: Tensor, route: Route, layer: Weight, tokens: int | None) -> None:
        self.mesh: Mesh = layer.mesh
        self.operation: Operation = layer.operation
        self.route, self.readers = route, 1
        self.dim = self.operation.tokens if route.takes == "tokens" else self.operation.features
        self._tokens = tokens
        self._pass = _Pass(-1)

    def gather(self, share: Tensor) -> Pending:
        """Begin to make of this rank's share what the products read."""
        return start_all_gather(share, self.mesh, self.route.output, self.dim, 1, self._tokens)

    def reference(self, share: Tensor) -> Tensor:
        """The input of the products, by a differentiable collective."""
        if self.route.takes == "split":
            return copy_to(share, self.mesh, self.route.output)
        return gather_to(share, self.mesh, self.route.output, self.dim, whole=self._tokens)

    def reduce(self, grad: Tensor) -> Tensor:
        """The gradient of the share from that of the whole; differentiable."""
        if self.route.takes == "split":
            return reduce_from(grad, self.mesh, self.route.output)
        return scatter_from(grad, self.mesh, self.route.output, self.dim)

    def _now(self) -> _Pass:
        task = torch._C._current_graph_task_id()
        if self._pass.task != task:
            self._pass = _Pass(task)
        return self._pass

    def start_again(self, share: Tensor) -> None:
        """Begin to gather the tensor once more for weight gradients, unless a reader has."""
        now = self._now()
        if now.gather is None:
            now.gather = self.gather(share)

    def again(self) -> Tensor:
        """The whole input, gathered a second time by `start_again`."""
        now = self._now()
        assert now.gather is not None
        if now.whole is None:
            now.whole = now.gather.wait()
        return now.whole

    def add(self, grad: Tensor, overlap: bool) -> None:
        """One reader's input gradient, which becomes ours; with the last one the sum's reduction begins.

        Args:
            grad: the gradient of the whole.
            overlap: let the reduction run while the reader goes on.
        """
        now = self._now()
        now.total = grad if now.total is None else now.total.add_(grad)
        now.given += 1
        if now.given == self.readers:
            now.reduction = self._start(now.total)
            if not overlap:
                now.reduced = now.reduction.wait()

    def leave(self) -> None:
        """One reader's backward is done: what was gathered again goes with the last."""
        now = self._now()
        now.left += 1
        if now.left == self.readers:
            now.gather = now.whole = None

    def reduced(self) -> Tensor | None:
        """The reduced sum of the gradients that came in this pass; some readers may have had no part in it."""
        now, self._pass = self._now(), _Pass(-1)
        if now.reduced is not None or now.total is None:
            return now.reduced
        return (now.reduction or self._start(now.total)).wait()

    def _start(self, total: Tensor) -> Pending:
        return start_scatter(total, self.mesh, self.route.output, self.route.takes, self.operation)


@dataclass(frozen=True)
class Source:
    """Where a product's input comes from: the entry, and this rank's share of it (for one call; it keeps tensors)."""

    entry: Entry
    share: Tensor


Entered = tuple[Tensor, Source | None]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, entry: Entry) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.entry = entry
        return share.view_as(share) if entry.route.takes == "split" else entry.gather(share).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        # Only gradients of gradients come through autograd; in one pass with those that readers have added.
        added = ctx.entry.reduced()
        if grad is None:
            return added, None
        found = ctx.entry.reduce(grad)
        return found if added is None else found + added, None


def enter(share: Tensor, route: Route, layer: Weight, tokens: int | None = None) -> Entered:
    """The input of a product, from this rank's share of it, and the entry that reduces its gradient.

    Args:
        share: the input as it came.
        route: how it came.
        layer: the product's layer.
        tokens: see `Entry`.

    Returns:
        The product's input, and where it comes from; None where it is the share itself.
    """
    if layer.mesh.size(route.output) == 1:
        return share, None
    entry = Entry(share, route, layer, tokens)
    return _Enter.apply(share, entry), Source(entry, share)


class SharedInput:
    """The input that several layers read, gathered for the first of them.

    Args:
        readers: how many layers read it.
    """

    def __init__(self, readers: int) -> None:
        self.readers = readers
        self._forget()

    def __deepcopy__(self, memo: dict) -> SharedInput:
        """A copied model enters its own tensors."""
        return SharedInput(self.readers)

    def _forget(self) -> None:
        self._input: Tensor | None = None
        self._key: tuple = ()
        self._made: Entered | None = None
        self._served: set[int] = set()

    def __call__(self, layer: Weight, input: Tensor, key: tuple, make: Callable[[], Entered]) -> Entered:
        """The input as the first reader has made it, or as this one makes it now.

        Args:
            layer: the reader.
            input: what it was called with.
            key: what else must be the same for all.
            make: enters the input.
        """
        key = (*key, 0 if input.is_inference() else input._version, torch.is_grad_enabled())
        if input is not self._input or key != self._key or id(layer) in self._served or self._made is None:
            self._input, self._key, self._made, self._served = input, key, make(), set()
        elif self._made[1] is not None:
            self._made[1].entry.readers += 1
        made = self._made
        self._served.add(id(layer))
        if len(self._served) == self.readers:
            self._forget()
        return made
