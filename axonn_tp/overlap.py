"""Weights gathered over z ahead of time, and their gradients waited for at the end (dissertation §5.2: OAG, ORS).

The order of gathers is learned from the last pass: when a layer asks for its weight, the gathers of the layers that
followed it last time are started. A weight's gradient is reduce-scattered when it is there and waited for as late as
autograd allows: by a node that was made before the model's forward began, which the engine therefore runs last.
All ranks run the same passes, so all start the same collectives in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from axonn_tp.collectives import Pending, scatter_from, start_all_gather, start_sum_of_shares
from axonn_tp.mesh import Mesh
from axonn_tp.options import Options

if TYPE_CHECKING:
    from axonn_tp.weight import SplitWeight

_AHEAD = 4
"""Weights that are gathered while one is used, where they are kept until backward all the same."""
_WHOLE_AT_ONCE = 4
"""Reduce-scatters under way that hold more than the share they will give."""


def in_backward() -> bool:
    """Whether autograd is running: a forward seen now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class Sums:
    """Reduce-scatters of weight gradients that are under way, by the node of the graph that will wait for each."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._started: dict[Any, Pending | Tensor] = {}

    def start(self, node: Any, grad: Tensor) -> None:
        """Begin that of a block's gradient, flat."""
        whole = [(one, sum_) for one, sum_ in self._started.items() if isinstance(sum_, Pending) and sum_.whole]
        if len(whole) == _WHOLE_AT_ONCE:
            oldest, sum_ = whole[0]
            self._started[oldest] = sum_.wait()
        self._started[node] = start_sum_of_shares(grad, self.mesh, "z")

    def share(self, node: Any) -> Tensor | None:
        """The shard's gradient, waited for; None where no reduce-scatter was begun for the node."""
        found = self._started.pop(node, None)
        return found.wait() if isinstance(found, Pending) else found

    def clear(self) -> None:
        """Forget those of a backward that was broken off."""
        for node in list(self._started):
            self.share(node)


class _Deferred(torch.autograd.Function):
    """Stands for a shard in the graph, without its values; backward waits for the shard's gradient.

    Its type is that in which the gradient is summed: autograd would cast, and so read, one of another type.
    """

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dtype: torch.dtype, layer: SplitWeight, sums: Sums) -> Tensor:
        ctx.layer, ctx.sums = layer, sums
        return shard.new_empty((), dtype=dtype).expand(shard.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        share = ctx.sums.share(ctx)
        return grad if share is None else ctx.layer.receive(share), None, None, None


class _Gathered(torch.autograd.Function):
    """A shard's block, flat; `late`: the gradient is handed on before its reduce-scatter is done, to `_Deferred`.

    The shard receives the gradient, `values` are what is gathered: the shard's, in the type that its layer computes in.
    """

    @staticmethod
    def forward(ctx: Any, shard: Tensor, values: Tensor, layer: SplitWeight, late: bool) -> Tensor:
        # The node that made a stand-in is what waits for its gradient.
        ctx.layer, ctx.waits, ctx.shape = layer, shard.grad_fn if late else None, shard.shape
        return layer.gathers.take(layer, values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        mesh, gathers = ctx.layer.mesh, ctx.layer.gathers
        gathers.release(ctx.layer)
        grad = ctx.layer.send(grad)
        if torch.is_grad_enabled():
            return scatter_from(grad, mesh, "z", 0), None, None, None
        if ctx.waits is None:
            return ctx.layer.receive(start_sum_of_shares(grad, mesh, "z").wait()), None, None, None
        gathers.sums.start(ctx.waits, grad)
        return grad.new_empty(()).expand(ctx.shape), None, None, None


class Gathers:
    """The weight gathers of one model.

    Args:
        mesh: the mesh.
        options: `overlap_reduce_scatter`, `overlap_all_gather` and `cache_gathers` are read.
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
        self.sums = Sums(mesh)

    def __deepcopy__(self, memo: dict) -> Gathers:
        """A copied model learns its own order."""
        return Gathers(self.mesh, self.options)

    def begin(self, layers: list[SplitWeight]) -> None:
        """The model's forward begins: forget what the last step left, and make the nodes that backward runs last."""
        for _, _, pending in self._pending.values():
            pending.wait()
        if not in_backward():
            self.sums.clear()
        for store in (self._pending, self._views, self._kept, self._sources, self._last):
            store.clear()
        if self.mesh.size("z") == 1:
            return
        if self.options.overlap_reduce_scatter and torch.is_grad_enabled() and not torch.is_anomaly_enabled():
            for layer in layers:
                shard = layer._shard()
                if shard.requires_grad:
                    dtype = layer.compute_dtype(shard)
                    stand_in = _Deferred.apply(shard, layer.summed_in(dtype), layer, self.sums)
                    self._views[layer] = stand_in, shard.detach().to(dtype)
        self._start_successors(_phase(), None)

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
            self._start_successors(phase, layer)
        flat = pending.wait()
        if phase == "forward" and layer.training:
            self._keep(layer, flat)
        return flat

    def release(self, layer: SplitWeight) -> None:
        """The layer's backward is done: what was kept for its recomputation may go."""
        self._kept.pop(layer, None)

    def _start_successors(self, phase: str, after: SplitWeight | None) -> None:
        """Start the gathers of the layers that followed last time; where weights stay until backward, of several."""
        stay = phase == "forward" and torch.is_grad_enabled() and not self.options.reshard_after_forward
        for _ in range(_AHEAD if stay else 1):
            after = self._successor.get((phase, after))
            if after is None or not self._start(phase, after):
                return

    def _start(self, phase: str, layer: SplitWeight) -> bool:
        """Start a layer's gather unless it is there; whether it could be."""
        if layer in self._pending or layer in self._kept:
            return True
        shard = self._views[layer][1] if layer in self._views else self._sources.get(layer, layer._shard().detach())
        if phase == "forward" and shard.dtype != layer.compute_dtype(shard):
            return False
        self._pending[layer] = (shard, shard._version, start_all_gather(shard, self.mesh, "z"))
        return True

    def _keep(self, layer: SplitWeight, flat: Tensor) -> None:
        held = sum(kept.nbytes for kept in self._kept.values())
        if len(self._kept) < self._most_layers and held + flat.nbytes <= self._most_bytes:
            self._kept[layer] = flat


def _phase() -> str:
    return "backward" if in_backward() else "forward"
