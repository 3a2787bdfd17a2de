"""Weights gathered over z ahead of time, and their gradients waited for at the end (dissertation §5.2: OAG, ORS).

The order of gathers is learned from the last pass: when a layer asks for its weight, the gathers of the layers that
followed it last time are started. A weight's gradient is reduce-scattered when it is there and waited for as late as
autograd allows: by a node that was made before the model's forward began, which the engine therefore runs last.
Small weights that follow each other share a gather, and gradients that do a reduce-scatter (`axonn_tp.comm.bundle`).
All ranks run the same passes, so all start the same collectives of the same tensors in the same order.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from axonn_tp.comm.bundle import Bundle, fits, start_all_gathers
from axonn_tp.comm.collectives import scatter_from, start_sum_of_shares
from axonn_tp.comm.recorded import apart_from_checkpoints
from axonn_tp.comm.sent_ahead import SentAhead
from axonn_tp.comm.shard_gradients import ShardGradients, given
from axonn_tp.comm.stalls import BACKWARD, calls_of, explained
from axonn_tp.comm.sums_of_shares import Sums
from axonn_tp.grid.mesh import Mesh
from axonn_tp.options import Options


class GatheredLayer(Protocol):
    """A layer whose weight is gathered, as the overlap of collectives sees it."""

    mesh: Mesh
    gathers: Gathers
    training: bool

    def _shard(self) -> Tensor: ...

    def compute_dtype(self, shard: Tensor) -> torch.dtype:
        """The type that the layer computes in."""

    def summed_in(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which gradients that are computed in `dtype` are summed over z."""

    def send(self, grad: Tensor) -> Tensor:
        """The gradient of the weight's block in the form in which it is summed over z."""

    def receive(self, grad: Tensor) -> Tensor:
        """The gradient that autograd adds to the shard's."""


_AHEAD = 4
"""Weights that are gathered while one is used, where they are kept until backward all the same."""


def in_backward() -> bool:
    """True if autograd is running: a forward seen now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class _Deferred(torch.autograd.Function):
    """Stands for a shard in the graph, without its values; backward waits for the shard's gradient.

    Its type is that in which the gradient is summed: autograd would cast, and so read, one of another type.
    """

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dtype: torch.dtype, layer: GatheredLayer, sums: Sums) -> Tensor:
        ctx.layer, ctx.sums = layer, sums
        return shard.new_empty((), dtype=dtype).expand(shard.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        with explained(ctx.layer.mesh.group("z")):
            share = ctx.sums.share(ctx)
        return given(ctx, grad if share is None else ctx.layer.receive(share)), None, None, None


class _Gathered(torch.autograd.Function):
    """A shard's block, flat; `late`: the gradient is handed on before its reduce-scatter is done, to `_Deferred`.

    The shard or its stand-in receives the gradient; `values` are the shard's, gathered in the type that its layer computes in.
    """

    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, values: Tensor, dtype: torch.dtype, layer: GatheredLayer, late: bool
    ) -> Tensor:
        # The node that made a stand-in is what waits for its gradient.
        ctx.layer, ctx.waits, ctx.shape = layer, shard.grad_fn if late else None, shard.shape
        return layer.gathers.take(layer, values, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        mesh, gathers = ctx.layer.mesh, ctx.layer.gathers
        gathers.release(ctx.layer)
        gathers.begin_backward()
        gathers.note(ctx.layer, "the gradient of ")
        grad = ctx.layer.send(grad)
        if torch.is_grad_enabled():
            return given(ctx, scatter_from(grad, mesh, "z", 0)), None, None, None, None
        if ctx.waits is None:
            share = start_sum_of_shares(grad, mesh, "z").wait()
            return given(ctx, ctx.layer.receive(share)), None, None, None, None
        gathers.sums.start(ctx.waits, grad)
        return grad.new_empty(()).expand(ctx.shape), None, None, None, None


_Key = tuple[int, int, torch.dtype]


def _key(shard: Tensor, dtype: torch.dtype) -> _Key:
    """Tells whether a gather is of this shard with these values in this type."""
    return shard.data_ptr(), shard._version, dtype


@dataclass(frozen=True)
class _Gather:
    """A gather under way.

    Attributes:
        key: of what.
        bundle: has the result.
        number: its place there.
        values: what is sent, which must live until then.
    """

    key: _Key
    bundle: Bundle
    number: int
    values: Tensor


class Gathers:
    """The weight gathers of one model.

    Args:
        mesh: the mesh.
        options: `overlap_reduce_scatter`, `overlap_all_gather`, `cache_gathers` and `bucket_bytes` are read.

    Attributes:
        forwards: how many forwards of models are under way, one inside another.
        parts: how many calls of parts of a model by themselves are.
        order: a digest of which layers asked for their weights so far, the same on all ranks of z unless they ran other passes.
    """

    def __init__(self, mesh: Mesh, options: Options) -> None:
        self.mesh, self.options = mesh, options
        self._most_layers, self._most_bytes = options.cached()
        self._successor: dict[tuple[str, GatheredLayer | None], GatheredLayer] = {}
        self._last: dict[str, GatheredLayer | None] = {}
        self._pending: dict[GatheredLayer, _Gather] = {}
        self._stand_ins: dict[GatheredLayer, tuple[Tensor, torch.dtype, Tensor]] = {}
        self._kept: dict[GatheredLayer, tuple[_Key, Tensor]] = {}
        self._sources: dict[GatheredLayer, tuple[Tensor, torch.dtype]] = {}
        self._numbers: dict[GatheredLayer, int] = {}
        self.forwards = self.parts = 0
        self.sums = Sums(mesh, options.bucket_bytes)
        self._gradients, self._sent = ShardGradients(), SentAhead()
        self.order, self._forward_since = 0, False

    def __deepcopy__(self, memo: dict) -> Gathers:
        """A copied model learns its own order."""
        return Gathers(self.mesh, self.options)

    def register(self, layer: GatheredLayer) -> None:
        """Give a layer its number in `order`; called in the same order on all ranks."""
        self._numbers[layer] = len(self._numbers) + 1

    def begin(self, layers: Sequence[GatheredLayer]) -> None:
        """The model's forward begins: forget what the last step left, and make the nodes that backward runs last."""
        for gather in self._pending.values():
            gather.bundle.wait()
        if not in_backward():
            self.sums.clear()
            self._sent.begin()
        for store in (self._pending, self._stand_ins, self._kept, self._sources, self._last):
            store.clear()
        if self.mesh.size("z") == 1:
            return
        if torch.is_grad_enabled() and not in_backward():
            self._gradients.begin(layers)
        if self.options.overlap_reduce_scatter and torch.is_grad_enabled() and not torch.is_anomaly_enabled():
            for layer in layers:
                shard = layer._shard()
                if shard.requires_grad:
                    dtype = layer.compute_dtype(shard)
                    stand_in = _Deferred.apply(shard, layer.summed_in(dtype), layer, self.sums)
                    self._stand_ins[layer] = shard, dtype, stand_in
        self._start_successors(_phase(), None)

    def enter(self) -> None:
        """The model's forward begins; forwards of models inside models nest."""
        self.forwards += 1

    def leave(self) -> None:
        """The model's forward ends."""
        self.forwards -= 1

    @property
    def in_forward(self) -> bool:
        """True if the model's forward is running, and so all ranks are in the same place."""
        return self.forwards > 0

    def block(self, layer: GatheredLayer) -> Tensor:
        """The block of this (x, y), flat and padded as its shards are; differentiable, the gradient goes to the shard."""
        shard: Tensor = layer._shard()
        dtype = layer.compute_dtype(shard)
        if self.mesh.size("z") == 1:
            return shard.to(dtype)
        if torch.is_grad_enabled() and shard.requires_grad:
            # The shard may be another than at the model's start: code may compute with weights of its own.
            known, known_dtype, stand_in = self._stand_ins.pop(layer, (None, dtype, shard))
            if known is shard and known_dtype == dtype:
                return _Gathered.apply(stand_in, shard.detach(), dtype, layer, True)
        return _Gathered.apply(shard, shard.detach(), dtype, layer, False)

    def again(self, layer: GatheredLayer, shard: Tensor, dtype: torch.dtype) -> Tensor:
        """The flat block of a shard that the forward has used, once more."""
        return shard.to(dtype) if self.mesh.size("z") == 1 else self.take(layer, shard, dtype)

    @apart_from_checkpoints()
    def take(self, layer: GatheredLayer, shard: Tensor, dtype: torch.dtype) -> Tensor:
        """The flat block: kept, under way or gathered now; the next layer's gather is started."""
        phase, key = _phase(), _key(shard, dtype)
        self.note(layer)
        self._sources[layer] = shard, dtype
        number = self._numbers.get(layer) or zlib.crc32(_name(layer).encode())  # in a copy of the model
        self.order = (self.order * 1_000_003 + number) % 2**62
        if phase == "forward":
            self._forward_since = True
        else:
            kept = self._kept.pop(layer, None)
            if kept is not None and kept[0] == key:
                return kept[1]
        gather = self._pending.pop(layer, None)
        ahead = gather is not None and gather.key == key
        if gather is None or not ahead:
            (gather,) = self._gather([(shard, dtype)])
        if self.options.overlap_all_gather and (phase == "backward" or self.in_forward):
            self._successor[phase, self._last.get(phase)] = layer
            self._last[phase] = layer
            self._start_successors(phase, layer)
        with explained(self.mesh.group("z")):
            flat = gather.bundle.take(gather.number)
        if ahead and phase == "forward":
            self._sent.look(shard.to(dtype), flat, self.mesh.group("z"), _name(layer))
        if phase == "forward" and layer.training:
            self._keep(layer, key, flat)
        return flat

    def begin_backward(self) -> None:
        """Note that the first gradient of a pass is there."""
        if self._forward_since:
            self._forward_since = False
            calls_of(self.mesh.group("z")).note(BACKWARD)

    def note(self, layer: GatheredLayer, part: str = "") -> None:
        """Say of which layer the next collective over z is (`axonn_tp.comm.stalls`)."""
        calls_of(self.mesh.group("z")).note(f"{part}layer {_name(layer)}")

    def _gather(self, wanted: Sequence[tuple[Tensor, torch.dtype]]) -> list[_Gather]:
        """Begin to gather shards, each in a type, all in one."""
        values = [shard.to(dtype) for shard, dtype in wanted]
        bundle = start_all_gathers(values, self.mesh, "z")
        return [
            _Gather(_key(*one), bundle, number, sent)
            for number, (one, sent) in enumerate(zip(wanted, values, strict=True))
        ]

    def source(self, layer: GatheredLayer) -> Tensor:
        """The shard that the layer's last block was made of."""
        kept = self._sources.get(layer)
        return layer._shard().detach() if kept is None else kept[0]

    def release(self, layer: GatheredLayer) -> None:
        """The layer's backward is done: what was kept for its recomputation may go, and nothing else than the parameter has its memory."""
        self._kept.pop(layer, None)
        self._sources.pop(layer, None)

    def _start_successors(self, phase: str, after: GatheredLayer | None) -> None:
        """Start the next gather of the layers that followed last time; where weights stay until backward, several."""
        stay = phase == "forward" and torch.is_grad_enabled() and not self.options.reshard_after_forward
        for _ in range(_AHEAD if stay else 1):
            after = self._start_next(phase, after)
            if after is None:
                return

    def _start_next(self, phase: str, after: GatheredLayer | None) -> GatheredLayer | None:
        """Start a gather of the layers that follow, unless it is there; the last of them, None where none could be started."""
        layer = self._successor.get((phase, after))
        if layer is None or layer in self._kept:
            return layer
        if layer in self._pending:
            return self._last_beside(phase, layer)
        run: dict[GatheredLayer, tuple[Tensor, torch.dtype]] = {}
        held = 0
        there = (run, self._pending, self._kept)
        while layer is not None and self._startable(phase, layer) and not any(layer in one for one in there):
            shard, dtype = self._wanted(phase, layer)
            size = shard.numel() * dtype.itemsize * self.mesh.size("z")
            # A layer that is called twice leads back to those that followed its first call.
            again = phase == "forward" and layer in self._sources
            joins = fits(held, size, self.options.bucket_bytes) and not again
            if run and not (joins and dtype == next(iter(run.values()))[1]):
                break
            run[layer], held = (shard, dtype), held + size
            layer = self._successor.get((phase, layer))
        if not run:
            return None
        self._pending.update(zip(run, self._gather(list(run.values())), strict=True))
        return next(reversed(run))

    def _last_beside(self, phase: str, layer: GatheredLayer) -> GatheredLayer:
        """The last of the layers that follow one whose gather is under way and are in the same."""
        while True:
            here, after = self._pending[layer], self._successor.get((phase, layer))
            following = None if after is None else self._pending.get(after)
            if following is None or following.bundle is not here.bundle or following.number <= here.number:
                return layer
            layer = after  # type: ignore[assignment]

    def _startable(self, phase: str, layer: GatheredLayer) -> bool:
        """True if a layer's shard can be gathered before it asks."""
        return True

    def _wanted(self, phase: str, layer: GatheredLayer) -> tuple[Tensor, torch.dtype]:
        """The shard and type that a layer will ask for, in backward those of its forward."""
        shard = layer._shard().detach()
        found = shard, layer.compute_dtype(shard)
        return self._sources.get(layer, found) if phase == "backward" else found

    def _keep(self, layer: GatheredLayer, key: _Key, flat: Tensor) -> None:
        held = sum(kept.nbytes for _, kept in self._kept.values())
        if len(self._kept) < self._most_layers and held + flat.nbytes <= self._most_bytes:
            self._kept[layer] = key, flat


def _name(layer: GatheredLayer) -> str:
    return getattr(layer, "axonn_name", type(layer).__name__)


def _phase() -> str:
    return "backward" if in_backward() else "forward"
