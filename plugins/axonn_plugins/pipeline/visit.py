"""Buckets of host memory that visit the device for one update each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from axonn_plugins.optim.gradients import flat_gradient
from axonn_plugins.optim.lending import Loan, TiledStep, along, other_groups
from axonn_plugins.optim.tiles import Slot
from axonn_plugins.pipeline.host_store import HostStore, Slice


class Visits:
    """One step of an optimizer: `update` for each bucket, then `finish`.

    What the optimizer counts, for a tensor or in a group, it counts once.

    Args:
        optimizer: over the weights in host memory.
        slots: of each device.
        factor: by which gradients are multiplied; None: by nothing.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, slots: Mapping[torch.device, list[Slot]], factor: Tensor | None
    ) -> None:
        self._step, self._slots, self._factor = TiledStep(optimizer), slots, factor
        self._next = {device: cycle(of_device) for device, of_device in slots.items()}
        self._known: dict[HostStore, dict[str, Tensor]] = {}

    def update(self, store: HostStore, begin: int, end: int, wait: Callable[[], Any] | None = None) -> None:
        """Update the elements `begin` to `end` of a store, and the parameters that they belong to.

        Args:
            store: where they are.
            begin: the first.
            end: behind the last.
            wait: for the gradients.
        """
        parts = [each for each in store.parts(begin, end) if each[0].parameter.grad is not None]
        if not parts:
            return
        slot = next(self._next[store.device])
        with slot.turn():
            if wait is not None:
                wait()
            weights = slot.fetch(store.weights[begin:end])
            known = self._known.setdefault(store, dict(store.states))
            states = {key: slot.fetch(state[begin:end]) for key, state in known.items()}
            gradients = slot.room(weights.dtype, weights.numel())
            loans = []
            for segment, part, place in parts:
                gradient = gradients[place].copy_(flat_gradient(segment.parameter)[part.begin : part.end])
                if self._factor is not None:
                    gradient.mul_(self._factor.to(gradient.device))
                visitors = {key: state[place] for key, state in states.items()}
                loans.append(Loan(part, weights[place], gradient, visitors, _keeper(store, segment)))
            self._step.tile(loans)
            for (segment, part, _), loan in zip(parts, loans, strict=True):
                part.of(segment.parameter).copy_(loan.weights)
            for host, visitor in [(store.weights, weights), *((known[key], states[key]) for key in known)]:
                host[begin:end].copy_(visitor, non_blocking=True)

    def finish(self) -> None:
        """Take over what the optimizer changed in its groups, and have the device wait for all buckets."""
        self._step.finish()
        for of_device in self._slots.values():
            for slot in of_device:
                slot.leave()


def _keeper(store: HostStore, segment: Slice) -> Callable[[str, Tensor], Tensor]:
    def keep(key: str, value: Tensor) -> Tensor:
        store.add_state(key, value.dtype)
        return store.state_of(key, segment)

    return keep


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
