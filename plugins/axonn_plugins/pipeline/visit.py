"""Buckets of host memory that visit the device for one update each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from axonn_plugins.pipeline.host_store import HostStore, Piece
from ted_moe.tiled_optimizer import flat_gradient
from ted_moe.tiles import along, flat, other_groups


class Slot:
    """Device memory for one bucket at a time; beside a GPU with a stream of its own, in which its buckets follow each other.

    Args:
        nbytes: of the memory.
        device: where it is.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._used = 0
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The slot is another bucket's."""
        self._used = 0
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield

    def room(self, dtype: torch.dtype, count: int) -> Tensor:
        """Memory for `count` elements."""
        nbytes = count * dtype.itemsize
        self._used += nbytes
        return self._memory[self._used - nbytes : self._used].view(dtype)

    def fetch(self, host: Tensor) -> Tensor:
        """A copy of a vector."""
        return self.room(host.dtype, host.numel()).copy_(host, non_blocking=True)

    def leave(self) -> None:
        """Have what comes next on the device wait for the slot's buckets."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


class Visits:
    """One step of an optimizer: `update` for each bucket, then `finish`.

    What the optimizer counts, for a tensor or in a group, it counts once.

    Args:
        optimizer: over the weights in host memory.
        keys: names of the state that has an element for each weight.
        slots: of each device.
        factor: by which gradients are multiplied; None: by nothing.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        keys: Iterable[str],
        slots: Mapping[torch.device, list[Slot]],
        factor: Tensor | None,
    ) -> None:
        self._optimizer, self._keys, self._slots, self._factor = optimizer, frozenset(keys), slots, factor
        self._next = {device: cycle(of_device) for device, of_device in slots.items()}
        self._known: dict[HostStore, dict[str, Tensor]] = {}
        self._before: dict[Tensor, dict[str, Any]] = {}
        self._options: dict[int, dict[str, Any]] = {}

    def update(self, store: HostStore, begin: int, end: int, wait: Callable[[], Any] | None = None) -> None:
        """Update the elements `begin` to `end` of a store, and the parameters that they belong to.

        Args:
            store: where they are.
            begin: the first.
            end: behind the last.
            wait: for the gradients.
        """
        pieces = [piece for piece in store.pieces(begin, end) if piece.segment.parameter.grad is not None]
        if not pieces:
            return
        slot = next(self._next[store.device])
        with slot.turn():
            if wait is not None:
                wait()
            weights = slot.fetch(store.weights[begin:end])
            known = self._known.setdefault(store, dict(store.states))
            states = {key: slot.fetch(state[begin:end]) for key, state in known.items()}
            gradient = slot.room(weights.dtype, weights.numel())
            options = dict(self._optimizer.param_groups[store.group])
            options["params"] = lent = [self._lend(piece, options, weights, gradient, states) for piece in pieces]
            with other_groups(self._optimizer, [options]):
                self._optimizer.step()
            self._options[store.group] = options
            for piece, part in zip(pieces, lent, strict=True):
                flat(piece.segment.parameter)[piece.of_parameter].copy_(part)
                self._take_back(store, begin, piece, part, states)
            for host, visitor in [(store.weights, weights), *((known[key], states[key]) for key in known)]:
                host[begin:end].copy_(visitor, non_blocking=True)

    def finish(self) -> None:
        """Take over what the optimizer changed in its groups, and have the device wait for all buckets."""
        for number, options in self._options.items():
            self._optimizer.param_groups[number].update({k: v for k, v in options.items() if k != "params"})
        for of_device in self._slots.values():
            for slot in of_device:
                slot.leave()

    def _lend(
        self,
        piece: Piece,
        options: Mapping[str, Any],
        weights: Tensor,
        gradient: Tensor,
        states: Mapping[str, Tensor],
    ) -> Tensor:
        """What the optimizer updates for a piece, with its gradient and state."""
        segment, place = piece.segment, piece.of_bucket
        part = weights[place]
        part.grad = gradient[place].copy_(flat_gradient(segment.parameter)[piece.of_parameter])
        if self._factor is not None:
            part.grad.mul_(self._factor.to(part.device))
        before = self._before.setdefault(segment.master, dict(self._optimizer.state.get(segment.master, {})))
        if before:
            beside = part.device if options.get("fused") or options.get("capturable") else None
            self._optimizer.state[part] = {
                key: states[key][place] if key in self._keys else _copy(value, beside) for key, value in before.items()
            }
        return part

    def _take_back(
        self, store: HostStore, begin: int, piece: Piece, part: Tensor, states: Mapping[str, Tensor]
    ) -> None:
        """Put a piece's state where it belongs; what is new goes to host memory at once."""
        part.grad = None
        segment = piece.segment
        found: Mapping[str, Any] = self._optimizer.state.pop(part, {})
        kept = self._optimizer.state[segment.master] if found else {}
        for key, value in found.items():
            if key not in self._keys:
                if piece.of_parameter.stop == segment.end - segment.begin:
                    kept[key] = value
                continue
            if key in states:
                place = states[key][piece.of_bucket]
            else:
                store.add_state(key, value.dtype)
                place = store.states[key][begin:][piece.of_bucket]
            if place.data_ptr() != value.data_ptr():
                place.copy_(value, non_blocking=True)
            kept[key] = store.state_of(key, segment)


def state_keys(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], weights: Tensor) -> set[str]:
    """Names of the state that an optimizer, which makes it when it steps, has for each element.

    Args:
        optimizer: left as it was.
        options: of a parameter group.
        weights: a stand-in of at least one dim, which is changed.
    """
    weights.grad = torch.ones_like(weights)
    with other_groups(optimizer, [{**options, "params": [weights]}]):
        optimizer.step()
    return {key for key, value in optimizer.state.pop(weights, {}).items() if along(value, weights)}


def _copy(value: Any, device: torch.device | None) -> Any:
    return value.to(device, copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
