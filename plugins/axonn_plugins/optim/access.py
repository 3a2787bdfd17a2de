"""One parameter's gradient, float32 weights and states as dense tensors, of which ranks may hold a share each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_plugins.optim.flat import FlatOptimizer
from axonn_plugins.optim.store import Bucket, Entry, Segment, Store
from axonn_plugins.optim.tiles import settle


class Access:
    """One parameter of a `FlatOptimizer`: gradient, weights and states; every rank that sums its gradient calls each method.

    Args:
        optimizer: the optimizer.
        parameter: one that it trains.
    """

    def __init__(self, optimizer: FlatOptimizer, parameter: nn.Parameter) -> None:
        self._optimizer, self._parameter = optimizer, parameter

    def gradient(self) -> Tensor | None:
        """The gradient of the coming step, averaged over ranks and with the loss scale in it.

        Returns:
            Of the parameter's shape, in float32 at least; None where none has come.
        """
        entry, _, store = self._found()
        self._optimizer.reducer.finish()
        if not entry.arrived:
            return None
        return self._gathered(lambda segment: _gradient(store, segment), store.dtype)

    @torch.no_grad()
    def set_gradient(self, value: Tensor) -> None:
        """Have the coming step take this gradient."""
        entry, bucket, store = self._found()
        self._optimizer.reducer.finish()
        if not entry.arrived:
            entry.arrived, entry.filled = True, not bucket.transient
        for segment in self._segments():
            _gradient(store, segment).copy_(self._part(value, segment))

    def weights(self) -> Tensor:
        """The float32 weights of a 16-bit parameter, else the parameter's own; of its shape."""
        store = self._found()[2]
        if store.master is None:
            return self._parameter.detach().clone()
        return self._gathered(lambda segment: segment.weights, torch.float32)

    @torch.no_grad()
    def set_weights(self, value: Tensor) -> None:
        """Train on from these weights."""
        entry, _, store = self._found()
        entry.write(entry.read(value.detach().to(self._parameter).reshape(-1), 0, entry.kept), 0)
        if store.master is not None:
            for segment in self._segments():
                segment.weights.copy_(self._part(value, segment))

    def state(self, key: str) -> Tensor:
        """One of the optimizer's states.

        Args:
            key: its name, such as "exp_avg".

        Returns:
            Of the parameter's shape; zeros where the parameter is pruned.

        Raises:
            ValueError: the optimizer has none of this name that is as large as the parameter, or has made no step.
        """
        states = self._optimizer.inner.state
        known = {
            name: t.dtype for s in self._segments() for name, t in states.get(s.weights, {}).items() if _whole(t, s)
        }
        kinds = self._agreed(known)
        if key not in kinds:
            raise ValueError(
                f"the optimizer has no state {key!r} of {self._found()[0].name!r}; it has {', '.join(sorted(kinds)) or 'none before its first step'}"
            )
        return self._gathered(lambda segment: states[segment.weights][key], kinds[key])

    def set_state(self, key: str, value: Tensor) -> None:
        """Go on from this state.

        Raises:
            ValueError: see `state`.
        """
        self.state(key)
        for segment in self._segments():
            self._optimizer.inner.state[segment.weights][key].copy_(self._part(value, segment))

    def _found(self) -> tuple[Entry, Bucket, Store]:
        for store in self._optimizer.stores:
            for bucket in store.buckets:
                for entry in bucket.entries:
                    if entry.parameter is self._parameter:
                        return entry, bucket, store
        raise ValueError("the optimizer does not train this parameter; give it one that requires a gradient")

    def _segments(self) -> Iterator[Segment]:
        entry, _, store = self._found()
        settle([store.device] if store.host else [])
        return (segment for segment in store.segments if segment.entry is entry)

    def _part(self, value: Tensor, segment: Segment) -> Tensor:
        return segment.entry.read(value.detach().reshape(-1), segment.begin, segment.begin + segment.length)

    def _gathered(self, part_of: Callable[[Segment], Tensor], dtype: torch.dtype) -> Tensor:
        entry, bucket, store = self._found()
        kept = torch.zeros(entry.kept, dtype=torch.promote_types(dtype, torch.float32), device=store.device)
        for segment in self._segments():
            kept[segment.begin : segment.begin + segment.length] = part_of(segment)
        if bucket.sharded:
            dist.all_reduce(kept, group=bucket.process_group)
        return entry.dense(kept)

    def _agreed(self, known: dict[str, torch.dtype]) -> dict[str, torch.dtype]:
        bucket = self._found()[1]
        if not bucket.sharded:
            return known
        every: list[dict[str, torch.dtype]] = [{}] * bucket.ranks
        dist.all_gather_object(every, known, group=bucket.process_group)
        return {key: dtype for theirs in every for key, dtype in theirs.items()}


def _gradient(store: Store, segment: Segment) -> Tensor:
    return store.gradient[segment.gradient : segment.gradient + segment.length]


def _whole(value: object, segment: Segment) -> bool:
    return isinstance(value, Tensor) and value.shape == (segment.length,)
