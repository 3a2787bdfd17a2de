"""Float32 weights and optimizer state in host memory, end to end, so that a bucket of them is one copy each way (000, 3.3.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from axonn_plugins.optim.gradients import flat_gradient
from axonn_plugins.optim.lending import Part, flat
from axonn_plugins.optim.store import host_zeros
from axonn_plugins.optim.tiles import Cut, ParameterCut

ALIGNED = 64
"""Elements to whose multiples parameters and buckets begin: vector instructions then take the same elements together as in a
step on whole tensors."""


def align(count: int) -> int:
    """The next multiple of `ALIGNED`."""
    return -(-count // ALIGNED) * ALIGNED


def ranges(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of `size` elements from `begin` to `end`, the last of what is left."""
    for start in range(begin, end, size):
        yield start, min(start + size, end)


@dataclass(eq=False)
class Slice:
    """A parameter's place in a store.

    Attributes:
        parameter: the one on the device.
        master: its weights in host memory, a view of the store with the parameter's shape and strides.
        begin: its first element in the store.
        end: behind its last.
        packed: its first element in the store's gradient, which has no gaps.
    """

    parameter: nn.Parameter
    master: Tensor
    begin: int
    end: int
    packed: int


@dataclass(eq=False)
class HostCut(ParameterCut):
    """The cut of a parameter whose state is in a store."""

    store: HostStore
    segment: Slice

    def keep(self, key: str, value: Tensor) -> Tensor:
        """See `axonn_plugins.optim.tiles.Cut`."""
        self.store.add_state(key, value.dtype)
        return self.store.state_of(key, self.segment)


class HostStore:
    """The parameters of one parameter group that have one type and device.

    Args:
        group: the number of the parameter group.
        parameters: at least one, without holes in memory.

    Attributes:
        weights: of the type in which the update is computed, float32 at least; in pinned memory beside a GPU.
        states: the optimizer's state, by its names, where it has an element for each weight.
        length: elements of `weights` and of each state, those between parameters included.
        elements: of the parameters.
        gradient: the gradients of all parameters in their own type on their device; None until `own_gradients`.
    """

    def __init__(self, group: int, parameters: Sequence[nn.Parameter]) -> None:
        self.group, self.device, self.dtype = group, parameters[0].device, parameters[0].dtype
        self.length = sum(align(parameter.numel()) for parameter in parameters)
        self.weights = self.make(torch.promote_types(self.dtype, torch.float32))
        self.states: dict[str, Tensor] = {}
        self.gradient: Tensor | None = None
        self.segments: list[Slice] = []
        begin = packed = 0
        for parameter in parameters:
            master = _shaped(self.weights, parameter, begin).copy_(parameter.detach())
            self.segments.append(Slice(parameter, master, begin, begin + parameter.numel(), packed))
            begin += align(parameter.numel())
            packed += parameter.numel()
        self.elements = packed

    def make(self, dtype: torch.dtype) -> Tensor:
        """Zeros in host memory for every element."""
        return host_zeros(self.length, dtype, self.device)

    def add_state(self, key: str, dtype: torch.dtype) -> None:
        """Make room for a state; nothing where there is."""
        if key not in self.states:
            self.states[key] = self.make(dtype)

    def state_of(self, key: str, segment: Slice) -> Tensor:
        """A parameter's part of a state, with the parameter's shape and strides."""
        return _shaped(self.states[key], segment.parameter, segment.begin)

    def packed(self, position: int) -> int:
        """Number of elements of parameters before a position of the store."""
        return sum(min(max(position - s.begin, 0), s.end - s.begin) for s in self.segments)

    def own_gradients(self, came: Callable[[], None] = lambda: None) -> None:
        """Have gradients stand end to end: what backward brings is moved into `gradient`, and the parameters' are views of it.

        Args:
            came: called whenever backward has brought one.
        """

        def take(segment: Slice) -> None:
            self._take(segment)
            came()

        self.gradient = torch.zeros(self.elements, dtype=self.dtype, device=self.device)
        for segment in self._trained:
            segment.parameter.register_post_accumulate_grad_hook(lambda _, segment=segment: take(segment))

    def take_gradients(self) -> None:
        """Have every trained parameter's gradient in `gradient`, as zeros where backward brought none."""
        for segment in self._trained:
            self._take(segment)

    @property
    def _trained(self) -> list[Slice]:
        return [segment for segment in self.segments if segment.parameter.requires_grad]

    def _take(self, segment: Slice) -> None:
        assert self.gradient is not None
        parameter = segment.parameter
        place = _shaped(self.gradient, parameter, segment.packed)
        if parameter.grad is None:
            parameter.grad = place.zero_()
        elif parameter.grad.data_ptr() != place.data_ptr():
            flat(place).copy_(flat_gradient(parameter))
            parameter.grad = place

    def cuts(self, begin: int, end: int) -> list[Cut]:
        """Parts of parameters that have gradients in a bucket, the elements `begin` to `end` of the store."""
        found: list[Cut] = []
        for segment in self.segments:
            first, last = max(begin, segment.begin), min(end, segment.end)
            if first < last and segment.parameter.grad is not None:
                part = Part(self.group, segment.master, first - segment.begin, last - segment.begin)
                found.append(HostCut(part, slice(first - begin, last - begin), segment.parameter, self, segment))
        return found

    @property
    def host_bytes(self) -> int:
        """Bytes of weights and state."""
        return self.weights.nbytes + sum(state.nbytes for state in self.states.values())

    @property
    def device_bytes(self) -> int:
        """Bytes of the parameters, and of their gradients as far as there are any."""
        parameters = [segment.parameter for segment in self.segments]
        kept = sum(parameter.nbytes for parameter in parameters)
        if self.gradient is not None:
            return kept + self.gradient.nbytes
        return kept + sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None)


def stores_of(group: int, parameters: Sequence[nn.Parameter]) -> list[HostStore]:
    """Stores for the parameters of a group, one for each type and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        if flat_length(parameter) != parameter.numel():
            parameter.data = parameter.data.contiguous()
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return [HostStore(group, alike) for alike in kinds.values()]


def _shaped(vector: Tensor, parameter: Tensor, begin: int) -> Tensor:
    return vector.as_strided(parameter.shape, parameter.stride(), begin)


def flat_length(tensor: Tensor) -> int:
    """Elements from a tensor's first to its last in memory; more than it has where it has holes."""
    return 1 + sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
