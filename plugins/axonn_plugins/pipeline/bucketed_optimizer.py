"""The optimizer whose state stays in host memory, and visits the device one bucket at a time (000, section 3.3.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_plugins.optim.lending import TiledStep, share_options
from axonn_plugins.optim.tiles import Slots, settle, visit
from axonn_plugins.pipeline.host_store import ALIGNED, HostStore, ranges, stores_of
from axonn_plugins.pipeline.reduction import Chunk, averaged, chunks_of
from axonn_tp.comm.optimizer_trial import examine, require_one_by_one
from ted_moe.tiled_optimizer import Factory, TiledOptimizer

BUCKET = 16_000_000
"""Elements of a bucket by default, the dissertation's."""


class BucketedOptimizer(TiledOptimizer):
    """Any element-wise torch optimizer, with float32 weights and state in pinned host memory.

    On the device stay the 16-bit parameters and gradients, 4φ bytes, and during a step 16·bucket_size bytes: weights, state,
    a float32 gradient and what the optimizer's arithmetic allocates, of two halves of a bucket. One half is on its way in or
    out while the other is updated. Parameters of other types are kept twice, too. The result is, to the bit, that of the same
    optimizer on float32 weights on the device whose gradients are upcast whole; with torch's fused kernels on the CPU to
    rounding. Only a parameter's step count may stay on the device, where the optimizer wants it there.

    ::

        optimizer = BucketedOptimizer(lambda groups: torch.optim.AdamW(groups, lr=1e-3, fused=True), model.parameters())

    With `group`, `step` also averages the gradients over data-parallel ranks, in chunks of coarsening·bucket_size
    elements, the last one in halves, and updates a chunk as soon as its average is there and while that of the next is
    under way (section 3.3.3). A gradient that backward did not bring counts as zeros. To the bit the result is that of
    averaging all of these chunks first. Clipping and loss scaling need every gradient before the first update, so with
    either nothing overlaps; with a `torch.amp.GradScaler` call `reduce` before ``scaler.step(optimizer)``.

    Args:
        optimizer_factory: makes the torch optimizer from parameter groups.
        params: what torch's optimizers take: parameters, named ones, or groups of these.
        bucket_size: elements, of 16 bytes, that a step may have on the device.
        max_norm: clip the gradient's norm to this.
        norm: how squared norms of the parameters' gradients, by name or number, become the square of the norm of all: for
            parameters that are shards or stages. By default their sum.
        group: the data-parallel ranks; None: gradients are averaged elsewhere.
        coarsening: buckets averaged in one call.
        overlap: whether updates begin before the last average is there.

    Raises:
        ValueError: arguments that are not allowed; an optimizer that is not element-wise.
    """

    def __init__(
        self,
        optimizer_factory: Factory,
        params: Iterable[Any],
        bucket_size: int = BUCKET,
        *,
        max_norm: float | None = None,
        norm: Callable[[dict[str, Tensor]], Tensor] | None = None,
        group: dist.ProcessGroup | None = None,
        coarsening: int = 4,
        overlap: bool = True,
    ) -> None:
        for name, number, least in (("bucket_size", bucket_size, 16 * ALIGNED), ("coarsening", coarsening, 1)):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(f"{name} = {number!r} is not a count; use an integer of at least {least}")
        self.bucket_size, self.group, self.coarsening, self.overlap = bucket_size, group, coarsening, overlap
        self._stores: list[HostStore] = []
        self._groups = 0
        self._reduced = False
        super().__init__(optimizer_factory, params, bucket_size, max_norm=max_norm, norm=norm)

    def _with_masters(self, group: dict[str, Any]) -> dict[str, Any]:
        masters: dict[nn.Parameter, Tensor] = {}
        for store in stores_of(self._groups, group["params"]):
            self._stores.append(store)
            if self.group is not None:
                store.own_gradients(self._came)
            for segment in store.segments:
                masters[segment.parameter] = segment.master
                self._live[segment.master] = segment.parameter
        self._groups += 1
        return {**group, "params": [masters[parameter] for parameter in group["params"]]}

    def _examine(self, group: dict[str, Any]) -> None:
        number = next(n for n, mine in enumerate(self.inner.param_groups) if mine is group)
        require_one_by_one(self.inner, group)
        for store in self._stores:
            masters = [s.master for s in store.segments if s.master.dim() and s.master.numel()]
            if store.group != number or not masters:
                continue
            smallest = min(masters, key=Tensor.numel)
            weights = smallest.to(store.device, copy=True)
            state = {key: _moved(value, store.device) for key, value in self.inner.state.get(smallest, {}).items()}
            self._memory |= examine(self.inner, group, weights, state)
        self._adopt_state()

    def _adopt_state(self) -> None:
        """Move state that the torch optimizer made by itself into the stores."""
        for store in self._stores:
            for segment in store.segments:
                state = self.inner.state.get(segment.master, {})
                for key in self._memory.keys & state.keys():
                    store.add_state(key, state[key].dtype)
                    place = store.state_of(key, segment)
                    if place.data_ptr() != state[key].data_ptr():
                        state[key] = place.copy_(state[key])

    # Averages

    def _came(self) -> None:
        """Backward has brought a gradient: averages of earlier ones, of which there may have been no step, say nothing of it."""
        self._reduced = False

    def reduce(self) -> None:
        """Average all gradients over the data-parallel ranks, and wait; `step` then does it no more."""
        for chunk in self._averaged():
            chunk.wait()

    def _averaged(self) -> Iterator[Chunk]:
        chunks = chunks_of(self._stores, self.coarsening * self.bucket_size, self.bucket_size)
        if self.group is None or self._reduced:
            yield from chunks
            return
        self._reduced = True
        for store in self._stores:
            store.take_gradients()
        yield from averaged(chunks, self.group)

    # The step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the weights a bucket at a time, and write them to the parameters; gradients stay, averaged.

        Args:
            closure: computes the loss again, and the gradients.

        Returns:
            What the closure returned.

        Raises:
            ValueError: a GradScaler has looked at gradients that are not averages yet.
        """
        if self.group is not None and not self._reduced and hasattr(self, "found_inf"):
            raise ValueError(
                "this step's gradients are not averaged yet, and a GradScaler would see an overflow on one rank alone; call "
                "optimizer.reduce() before scaler.step(optimizer), and before scaler.unscale_(optimizer)"
            )
        try:
            return super().step(closure)
        finally:
            self._reduced = False

    def _factor(self) -> Tensor | None:
        if self.max_norm is not None or not self.overlap:
            self.reduce()
        return super()._factor()

    def _step(self, factor: Tensor | None) -> None:
        scaled = getattr(self, "grad_scale", None) is not None
        self.overflow = scaled and self.total_norm is not None and not math.isfinite(self.total_norm)
        if self.overflow:
            return
        share_options(self.param_groups, self.inner.param_groups)
        sizes = {store: self._elements(store) for store in self._stores}
        step, slots = TiledStep(self.inner), Slots(self._slot_bytes())
        known = {store: dict(store.states) for store in self._stores}
        for chunk in self._averaged():
            store = chunk.store
            for begin, end in ranges(chunk.begin, chunk.end, sizes[store]):
                if cuts := store.cuts(begin, end):
                    slot, span = slots.next(store.device), slice(begin, end)
                    visit(step, cuts, slot, factor, span, store.weights, known[store], chunk.wait)
        step.finish()
        slots.leave()
        share_options(self.inner.param_groups, self.param_groups)

    def _slot_bytes(self) -> dict[torch.device, int]:
        sizes: dict[torch.device, int] = {}
        for store in self._stores:
            vectors = 2 + len(store.states)  # weights and gradient
            nbytes = vectors * store.weights.itemsize * self._elements(store)
            sizes[store.device] = max(nbytes, sizes.get(store.device, 0))
        return sizes

    def _elements(self, store: HostStore) -> int:
        """Elements of half a bucket, such that all that a step has on the device is 16·bucket_size bytes."""
        count = 16 * self.bucket_size // (Slots.count * store.weights.itemsize * self._vectors(store))
        return min(max(count - count % ALIGNED, ALIGNED), store.length)

    def _vectors(self, store: HostStore) -> int:
        new = any(not self.state.get(segment.master) for segment in store.segments)
        return 1 + len(store.states) + (self._memory.first if new else self._memory.later)

    # Memory

    @property
    def device_bytes(self) -> int:
        """Bytes of parameters and gradients on the device: 4φ with 16-bit ones."""
        return sum(store.device_bytes for store in self._stores)

    @property
    def step_bytes(self) -> int:
        """Bytes that the next step will have on a device beside these: at most 16·bucket_size."""
        needs = (self._elements(s) * s.weights.itemsize * self._vectors(s) for s in self._stores)
        return Slots.count * max(needs, default=0)

    @property
    def host_bytes(self) -> int:
        """Bytes of weights and optimizer state in host memory."""
        return sum(store.host_bytes for store in self._stores)

    # Checkpoints

    def refresh_masters(self) -> None:
        """Take the weights of parameters that were changed from outside from these; weights that round to theirs stay."""
        self._settle()
        super().refresh_masters()

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the same optimizer over float32 weights, and these as "masters", by number."""
        self._settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` returned, or the plain optimizer's; then weights are those that round to the parameters.

        Raises:
            ValueError: it is of other parameters.
        """
        self._settle()
        super().load_state_dict(state_dict)
        self._adopt_state()

    def _settle(self) -> None:
        """Wait until what is on its way to host memory is there."""
        settle(store.device for store in self._stores)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) and value.dim() else value
