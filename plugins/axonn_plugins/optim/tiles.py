"""A tile's step: gradients upcast, weights updated, rounded and written back (000, sections 4.1.3, 7.2 and 3.3.2).

Upcasting whole gradients and rounding whole weights takes 6 bytes an element; here it takes them for one tile. State in host
memory is copied to the device and back a tile at a time, one tile while another is updated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from axonn_plugins.optim.gradients import flat_gradient
from axonn_plugins.optim.lending import Loan, Part, TiledStep, flat

_SLOTS = 2  # one tile is on its way in or out while the other is updated
_ALIGNED = 16


class Memory(Protocol):
    """Where temporary vectors of a tile are."""

    def get(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The tile's vector of this kind, the same one until the next tile."""


class Buffers:
    """Memory for one tile, kept for the next.

    Args:
        size: elements of the longest tile.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._made: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def get(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Memory`."""
        if (dtype, device) not in self._made:
            self._made[dtype, device] = torch.empty(self.size, dtype=dtype, device=device)
        return self._made[dtype, device]

    @property
    def nbytes(self) -> int:
        """Bytes of all vectors."""
        return sum(buffer.nbytes for buffer in self._made.values())


class Slot:
    """Device memory for one visiting tile at a time; beside a GPU with a stream of its own, in which its tiles follow each other.

    Args:
        nbytes: of the memory.
        device: where it is.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._used = self._length = 0
        self._made: dict[torch.dtype, Tensor] = {}
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def turn(self, length: int) -> Iterator[None]:
        """The slot is another tile's, of `length` elements."""
        self._used, self._length, self._made = 0, length, {}
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield

    def get(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Memory`."""
        if dtype not in self._made:
            self._made[dtype] = self._room(dtype)
        return self._made[dtype]

    def fetch(self, host: Tensor) -> Tensor:
        """A copy of a vector."""
        return self._room(host.dtype).copy_(host, non_blocking=True)

    def _room(self, dtype: torch.dtype) -> Tensor:
        begin = -(-self._used // _ALIGNED) * _ALIGNED
        self._used = begin + self._length * dtype.itemsize
        return self._memory[begin : self._used].view(dtype)

    def leave(self) -> None:
        """Have what comes next on the device wait for the slot's tiles."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


class Slots:
    """Slots of devices, each in its turn.

    Args:
        nbytes: of a slot, by device.
    """

    count = _SLOTS

    def __init__(self, nbytes: Mapping[torch.device, int]) -> None:
        self._slots = {device: deque(Slot(size, device) for _ in range(_SLOTS)) for device, size in nbytes.items()}

    def next(self, device: torch.device) -> Slot:
        """The slot whose turn it is."""
        self._slots[device].rotate()
        return self._slots[device][0]

    def leave(self) -> None:
        """Have what comes next on the devices wait for all visits."""
        for slots in self._slots.values():
            for slot in slots:
                slot.leave()


def settle(devices: Iterable[torch.device]) -> None:
    """Wait until what is on its way between devices and host memory is there."""
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def slot_bytes(length: int, *dtypes: torch.dtype) -> int:
    """Bytes of a slot for vectors of these dtypes."""
    return sum(length * dtype.itemsize + _ALIGNED for dtype in dtypes)


@dataclass(eq=False)
class Cut(ABC):
    """The part of a parameter that is in a tile.

    Attributes:
        part: its elements of the tensor on which the optimizer's state is keyed.
        within: its elements of the tile.
    """

    part: Part
    within: slice

    @abstractmethod
    def weights(self, memory: Memory) -> Tensor:
        """The weights that the optimizer updates where state is on the device: flat, in the type of the update."""

    @abstractmethod
    def gradient(self, dtype: torch.dtype, factor: Tensor | None, memory: Memory) -> Tensor:
        """The gradient times `factor`, flat, in the type of the update."""

    @abstractmethod
    def write(self, weights: Tensor, memory: Memory) -> None:
        """Round the updated weights, and put them into the parameter."""

    def keep(self, key: str, value: Tensor) -> Tensor:
        """Memory for a new state of the whole tensor, of which `value` is this part's."""
        return self.part.like(value)


@dataclass(eq=False)
class ParameterCut(Cut):
    """The cut of a parameter whose gradient is its own, and stays.

    Attributes:
        parameter: without holes in memory, as `part.weights`, which are it or its master weights.
    """

    parameter: nn.Parameter

    def weights(self, memory: Memory) -> Tensor:
        """See `Cut`."""
        return self.part.weights if self.part.whole else self.part.of(self.part.weights)

    def gradient(self, dtype: torch.dtype, factor: Tensor | None, memory: Memory) -> Tensor:
        """See `Cut`."""
        gradient = flat_gradient(self.parameter)[self.part.begin : self.part.end]
        if factor is None and gradient.dtype == dtype:
            return gradient
        made = memory.get(dtype, gradient.device)[self.within].copy_(gradient)
        return made if factor is None else made.mul_(factor.to(made.device))

    def write(self, weights: Tensor, memory: Memory) -> None:
        """See `Cut`."""
        if self.parameter is not self.part.weights:
            self.part.of(self.parameter).copy_(flat(weights))


def update(
    step: TiledStep,
    cuts: Sequence[Cut],
    memory: Memory,
    factor: Tensor | None,
    weights: Tensor | None = None,
    visitors: Mapping[str, Tensor] | None = None,
) -> None:
    """Update a tile.

    Args:
        step: of the optimizer.
        cuts: the parts of parameters in it that have gradients.
        memory: for vectors of its length.
        factor: by which gradients are multiplied; None: by nothing.
        weights: those of the tile, to be updated; None: each cut's own.
        visitors: the tile's state, to be updated, by key; None: what the optimizer keeps.
    """
    loans = []
    for cut in cuts:
        mine = cut.weights(memory) if weights is None else weights[cut.within]
        state = None if visitors is None else {key: vector[cut.within] for key, vector in visitors.items()}
        loans.append(Loan(cut.part, mine, cut.gradient(mine.dtype, factor, memory), state, cut.keep))
    step.tile(loans)
    for cut, loan in zip(cuts, loans, strict=True):
        cut.write(loan.weights, memory)


def visit(
    step: TiledStep,
    cuts: Sequence[Cut],
    slot: Slot,
    factor: Tensor | None,
    span: slice,
    weights: Tensor | None,
    states: Mapping[str, Tensor],
    wait: Callable[[], Any] = lambda: None,
) -> None:
    """Update a tile whose state is in host memory, with copies of it on the device.

    Args:
        step: see `update`.
        cuts: see `update`.
        slot: where the tile visits.
        factor: see `update`.
        span: the tile's elements of the vectors in host memory.
        weights: float32 weights in host memory; None: each cut's own.
        states: in host memory, by key, as far as it was there when the step began.
        wait: for the gradients.
    """
    with slot.turn(span.stop - span.start):
        wait()
        here = {} if weights is None else {weights: slot.fetch(weights[span])}
        visitors = {key: slot.fetch(state[span]) for key, state in states.items()}
        update(step, cuts, slot, factor, None if weights is None else here[weights], visitors)
        for host, visitor in [*here.items(), *((states[key], visitors[key]) for key in states)]:
            host[span].copy_(visitor, non_blocking=True)
