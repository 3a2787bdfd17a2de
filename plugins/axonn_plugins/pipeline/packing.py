"""A tensor, or a tuple of tensors of any types, as one message: integers that say what it is, and its bytes; no pickle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.uint8),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
)
_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
_WORD = 8
_FIXED = 7  # words: bytes in all, room for a later message, microbatch, two times, form, number of tensors
_USUAL = 32  # words that say what a message is, unless its tensors are many or of many dims
_ALIGNED = 64
FIRST_ROOM = 64
"""Bytes that a receiver expects before it knows anything: at least the fixed words."""
UNKNOWN = -(2**63)
"""A time that nobody has measured."""


class Message(NamedTuple):
    """A message from one stage to another.

    Attributes:
        microbatch: which one.
        tensors: None where a gradient is missing.
        single: a tensor by itself, not a tuple of one.
        differentiable: by tensor: whether a gradient is wanted for it.
        alone: an input, whose microbatch is in the pipeline by itself.
    """

    microbatch: int
    tensors: tuple[Tensor | None, ...]
    single: bool
    differentiable: tuple[bool, ...]
    alone: bool = False


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@dataclass
class Packed:
    """A message as bytes.

    Attributes:
        buffer: (bytes,), uint8; at least as many as the receiver has made room for.
        total: how many of them the message has.
        later: room that the receiver shall make for a later message.
        kind: what the message is, but for its numbers; of a buffer of the same kind only these are written again.
        heard: see `times`.
    """

    buffer: Tensor
    total: int
    later: int
    kind: tuple
    parts: list[Tensor]
    heard: int = UNKNOWN

    def __post_init__(self) -> None:
        words = self.buffer[: 5 * _WORD].view(torch.int64)
        # Whoever comes from a wait has cold caches, and pays tens of microseconds for each of torch's operations.
        self._head: Any = words.numpy() if self.buffer.device.type == "cpu" else words

    def write(self, message: Message) -> None:
        """The numbers of another message of the same kind."""
        present = (tensor for tensor in message.tensors if tensor is not None)
        for part, tensor in zip(self.parts, present, strict=True):
            part.copy_(tensor.detach())
        numbers = (self.total, self.later, message.microbatch, perf_counter_ns(), self.heard)
        self._head[:] = numbers if isinstance(self._head, np.ndarray) else torch.tensor(numbers)


def pack(
    message: Message,
    room: int,
    later: int,
    device: torch.device,
    used: Packed | None = None,
    heard: int = UNKNOWN,
) -> Packed:
    """The message as bytes.

    Args:
        message: its tensors may have any strides.
        room: bytes that the receiver has made room for.
        later: bytes that it shall make room for later, at least; this message's size if that is larger.
        device: where the bytes are.
        used: a buffer that is free, taken if it suits.
        heard: see `times`.

    Raises:
        ValueError: a type of tensor that cannot be sent.
    """
    kind = (
        message.single,
        message.alone,
        message.differentiable,
        *[None if t is None else (t.dtype, t.shape) for t in message.tensors],
    )
    if used is not None and used.kind == kind and used.buffer.numel() >= room:
        used.later, used.heard = max(later, used.total), heard
        used.write(message)
        return used
    words = [0, 0, message.microbatch, 0, 0, message.single + 2 * message.alone, len(message.tensors)]
    for tensor, wanted in zip(message.tensors, message.differentiable, strict=True):
        if tensor is None:
            words += (-1, int(wanted), 0)
            continue
        if tensor.dtype not in _NUMBERS or tensor.layout != torch.strided:
            raise ValueError(
                f"a tensor of type {tensor.dtype} and layout {tensor.layout} cannot go from stage to stage; send dense tensors of "
                "the usual types"
            )
        words += (_NUMBERS[tensor.dtype], int(wanted), tensor.dim(), *tensor.shape)
    total = _aligned(len(words) * _WORD)
    places = []
    for tensor in message.tensors:
        places.append(total)
        total += 0 if tensor is None else _aligned(_size(tensor))
    buffer = torch.empty(max(total, room), dtype=torch.uint8, device=device)
    buffer[: len(words) * _WORD].view(torch.int64).copy_(torch.tensor(words))
    parts = [
        _at(buffer, place, tensor.dtype, tensor.shape)
        for tensor, place in zip(message.tensors, places, strict=True)
        if tensor is not None
    ]
    packed = Packed(buffer, total, max(later, total), kind, parts, heard)
    packed.write(message)
    return packed


def words_of(packed: Tensor) -> list[int]:
    """A message's first integers, as many as there are: all that most have. On an accelerator the host waits for them."""
    return _words(packed, _USUAL)


def sizes(words: Sequence[int]) -> tuple[int, int]:
    """Bytes of a message of which `FIRST_ROOM` bytes are there, and the room for a later one, of its first integers."""
    total, later = words[:2]
    return total, later


def times(words: Sequence[int]) -> tuple[int, int]:
    """When a message was packed, by the sender's clock, and how long messages to the sender seemed to it to take.

    Both in nanoseconds; `UNKNOWN` where it has heard of nothing.
    """
    sent, heard = words[3:5]
    return sent, heard


def _words(packed: Tensor, end: int) -> list[int]:
    whole = packed.numel() // _WORD
    if packed.device.type == "cpu":
        return packed.numpy()[: min(end, whole) * _WORD].view(np.int64).tolist()
    return packed[: min(end, whole) * _WORD].view(torch.int64).tolist()


def unpack(packed: Tensor, words: list[int]) -> Message:
    """The inverse of `pack`; the tensors share the memory of `packed`.

    Args:
        packed: the whole message.
        words: its first integers.
    """
    _, _, microbatch, _, _, form, count = words[:_FIXED]
    tensors: list[Tensor | None] = []
    wanted = []
    shapes, at = [], _FIXED
    for _ in range(count):
        if len(words) < at + 3 or len(words) < at + 3 + words[at + 2]:
            words = _words(packed, at + 512)
        number, flag, dims = words[at : at + 3]
        shapes.append((number, words[at + 3 : at + 3 + dims]))
        wanted.append(bool(flag))
        at += 3 + dims
    place = _aligned(at * _WORD)
    for number, shape in shapes:
        if number < 0:
            tensors.append(None)
            continue
        tensor = _at(packed, place, DTYPES[number], shape)
        tensors.append(tensor)
        place += _aligned(_size(tensor))
    return Message(microbatch, tuple(tensors), bool(form & 1), tuple(wanted), bool(form & 2))


def _at(packed: Tensor, place: int, dtype: torch.dtype, shape: torch.Size | list[int]) -> Tensor:
    """A tensor in the memory of `packed` that autograd does not take for a view of it."""
    empty = torch.empty(0, dtype=dtype, device=packed.device)
    if not prod(shape):
        return empty.reshape(shape)
    strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    return empty.set_(packed.untyped_storage(), place // empty.element_size(), list(shape), strides)
