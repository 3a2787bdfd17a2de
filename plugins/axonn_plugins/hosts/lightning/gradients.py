"""Gradients of one model are summed over the ranks that read other data, once backward has made them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import nn

from axonn_tp import GradientReducer, Mesh


class Gradients:
    """The sums of one model's gradients, some of them under way while backward runs.

    What no rank has a gradient of stays without, so that its optimizer leaves it alone, as in one process.

    Args:
        model: split over the mesh.
        mesh: its mesh.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._model, self._mesh = model, mesh
        self._reducers: list[GradientReducer] = []
        self._known: set[int] = set()
        self._syncing = True
        self.prepare()

    def prepare(self) -> None:
        """Before backward: parameters may be trained from now on that were frozen."""
        new = [p for p in self._model.parameters() if p.requires_grad and id(p) not in self._known]
        if new:
            self._known.update(map(id, new))
            self._reducers.append(GradientReducer(new, self._mesh))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate."""
        with ExitStack() as stack:
            for reducer in self._reducers:
                stack.enter_context(reducer.no_sync())
            self._syncing = False
            try:
                yield
            finally:
                self._syncing = True

    @torch.no_grad()
    def finish(self) -> None:
        """After backward: the gradients are sums; every rank calls it."""
        if not self._syncing or not self._reducers:
            return
        parameters = [p for p in self._model.parameters() if id(p) in self._known]
        present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=self._mesh.device)
        if self._mesh.size("grid") > 1:
            dist.all_reduce(present, dist.ReduceOp.MAX, group=self._mesh.group("grid"))
        for reducer in self._reducers:
            reducer.finish()
        for parameter, found in zip(parameters, present.tolist(), strict=True):
            if not found:
                parameter.grad = None
