"""Weights gathered over z ahead of time, and their gradients waited for at the end (dissertation §5.2: OAG, ORS).

The order of gathers is learned from the last pass: when a layer asks for its weight, the gather of the layer that
followed it last time is started. A weight's gradient is reduce-scattered when it is there and waited for as late as
autograd allows: by a node that was made before the model's forward began, which the engine therefore runs last.
All ranks run the same passes, so all start the same collectives in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from axonn_tp.collectives import Pending, scatter_from, start_all_gather, start_reduce_scatter, wait
from axonn_tp.mesh import Mesh
from axonn_tp.options import Options

if TYPE_CHECKING:
    from axonn_tp.weight import SplitWeight


def in_backward() -> bool:
    """Whether autograd is running: a forward seen now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class _Deferred(torch.autograd.Function):
    """Stands for a shard in the graph, without its values; backward waits for the shard's gradient.

    Its type is that in which the gradient is summed: autograd would cast, and so read, one of another type.
    """

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dtype: torch.dtype) -> Tensor:
        return shard.new_empty((), dtype=dtype).expand(shard.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad if torch.is_grad_enabled() else wait(grad), None


class _Gathered(torch.autograd.Function):
    """A shard's block, flat; `late`: the gradient is handed on before its reduce-scatter is done, to `_Deferred`.

    The shard receives the gradient, `values` are what is gathered: the shard's, in the type that its layer computes in.
    """

    @staticmethod
    def forward(ctx: Any, shard: Tensor, values: Tensor, layer: SplitWeight, late: bool) -> Tensor:
        ctx.layer, ctx.late = layer, late
        return layer.gathers.take(layer, values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        mesh, gathers = ctx.layer.mesh, ctx.layer.gathers
        gathers.release(ctx.layer)
        grad = grad.to(gathers.options.summed_in(grad.dtype))
        if torch.is_grad_enabled():
            return scatter_from(grad, mesh, "z", 0), None, None, None
        pending = start_reduce_scatter(grad, mesh, "z")
        return pending.tensor if ctx.late else pending.wait(), None, None, None


class Gathers:
    """The weight gathers of one model.

    Args:
        mesh: the mesh.
        options: `overlap_reduce_scatter`, `overlap_all_gather`, `cache_gathers` and `gradient_dtype` are read.
    """

    def __init__(self, mesh: Mesh, options: Options) -> None:
        self.mesh, self.options = mesh, options
        self._most_layers, self._most_bytes = options.cached()
        self._successor: dict[tuple[str, SplitWeight | None], SplitWeight] = {}
        self._last: dict[str, SplitWeight | None] = {}
        self._pending: dict[SplitWeight, tuple[Tensor, int, Pending]] = {}
        self._views: dict[SplitWeight, tuple[Tensor, Tensor]] = {}
        self._kept: dict[SplitWeight, Tensor] = {}
        self._sources: dict[SplitWeight, Tensor] = {}

    def __deepcopy__(self, memo: dict) -> Gathers:
        """A copied model learns its own order."""
        return Gathers(self.mesh, self.options)

    def begin(self, layers: list[SplitWeight]) -> None:
        """The model's forward begins: forget what the last step left, and make the nodes that backward runs last."""
        for _, _, pending in self._pending.values():
            pending.wait()
        for store in (self._pending, self._views, self._kept, self._sources, self._last):
            store.clear()
        if self.mesh.size("z") == 1:
            return
        if self.options.overlap_reduce_scatter and torch.is_grad_enabled() and not torch.is_anomaly_enabled():
            for layer in layers:
                shard = layer._shard()
                if shard.requires_grad:
                    dtype = layer.compute_dtype(shard)
                    stand_in = _Deferred.apply(shard, self.options.summed_in(dtype))
                    self._views[layer] = stand_in, shard.detach().to(dtype)
        self._start_successor(_phase(), None)

    def block(self, layer: SplitWeight) -> Tensor:
        """The block of this (x, y), flat and padded as its shards are; differentiable, the gradient goes to the shard."""
        shard: Tensor = layer._shard()
        dtype = layer.compute_dtype(shard)
        if self.mesh.size("z") == 1:
            return shard.to(dtype)
        if torch.is_grad_enabled() and shard.requires_grad:
            stand_in, values = self._views.pop(layer, (shard, shard))
            if stand_in is not shard and values.dtype == dtype:
                return _Gathered.apply(stand_in, values, layer, True)
        return _Gathered.apply(shard, shard.detach().to(dtype), layer, False)

    def again(self, layer: SplitWeight, dtype: torch.dtype) -> Tensor:
        """The flat block once more, for backward."""
        shard = self._sources.get(layer, layer._shard().detach()).to(dtype)
        return shard if self.mesh.size("z") == 1 else self.take(layer, shard)

    def take(self, layer: SplitWeight, shard: Tensor) -> Tensor:
        """The flat block: kept, under way or gathered now; the next layer's gather is started."""
        phase = _phase()
        if phase == "backward" and layer in self._kept:
            return self._kept.pop(layer)
        self._sources[layer] = shard
        source, version, pending = self._pending.pop(layer, (None, 0, None))
        if pending is None or source.data_ptr() != shard.data_ptr() or version != shard._version:  # type: ignore[union-attr]
            pending = start_all_gather(shard, self.mesh, "z")
        if self.options.overlap_all_gather and (phase == "backward" or self.mesh.in_forward):
            self._successor[phase, self._last.get(phase)] = layer
            self._last[phase] = layer
            self._start_successor(phase, layer)
        flat = pending.wait()
        if phase == "forward" and layer.training:
            self._keep(layer, flat)
        return flat

    def release(self, layer: SplitWeight) -> None:
        """The layer's backward is done: what was kept for its recomputation may go."""
        self._kept.pop(layer, None)

    def _start_successor(self, phase: str, after: SplitWeight | None) -> None:
        layer = self._successor.get((phase, after))
        if layer is None or layer in self._pending or layer in self._kept:
            return
        shard = self._views[layer][1] if layer in self._views else self._sources.get(layer, layer._shard().detach())
        if phase == "forward" and shard.dtype != layer.compute_dtype(shard):
            return
        self._pending[layer] = (shard, shard._version, start_all_gather(shard, self.mesh, "z"))

    def _keep(self, layer: SplitWeight, flat: Tensor) -> None:
        held = sum(kept.nbytes for kept in self._kept.values())
        if len(self._kept) < self._most_layers and held + flat.nbytes <= self._most_bytes:
            self._kept[layer] = flat


def _phase() -> str:
    return "backward" if in_backward() else "forward"
