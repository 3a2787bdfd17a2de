"""Short digests of tensors and random state, by which ranks find that they have the same.

A digest is of the bits, and of their order. Where digests differ, sketches tell how far: random signs project a tensor on a
few numbers, whose differences have the tensors' distance as standard deviation (Johnson and Lindenstrauss).
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

GENERATORS = ("torch's", "the device's", "Python's", "numpy's")
"""Whose state `random_state` digests, in its order."""
_PART = 2**16
_ODD = -7046029254386353131
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SKETCHED = 4
_weights: dict[torch.device, Tensor] = {}


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """A number of 64 bits on the tensor's device."""
    tensor, *places = _parts(tensor.detach())
    if places:
        return functools.reduce(lambda found, part: found * 31 + digest(part), places, digest(tensor))
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = tensor.contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])
    weights = _weights_on(tensor.device)
    total = torch.full((), bits.numel(), dtype=torch.int64, device=tensor.device)
    for part in bits.split(_PART):
        total = total * _ODD + (part * weights[: part.numel()]).sum()
    return total


def _parts(tensor: Tensor) -> list[Tensor]:
    """The values of a sparse tensor, and where they are; of another the tensor itself."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._values(), tensor._indices()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.values(), tensor.crow_indices(), tensor.col_indices()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.values(), tensor.ccol_indices(), tensor.row_indices()]
    return [tensor]


def _weights_on(device: torch.device) -> Tensor:
    if device not in _weights:
        _weights[device] = torch.arange(1, _PART + 1, device=device) * _ODD | 1
    return _weights[device]


def of_text(text: str) -> int:
    """The same for text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def random_state(device: torch.device) -> list[int]:
    """Digests of the generators' states, in the order of `GENERATORS`."""
    numpy = np.random.get_state()  # noqa: NPY002  the legacy generator is the one scripts seed
    on_device = of_bytes(torch.cuda.get_rng_state(device)) if device.type == "cuda" else 0
    keys, place = torch.from_numpy(numpy[1].view(np.int32)), hash(numpy[2:])  # type: ignore[union-attr,index]
    return [of_bytes(torch.get_rng_state()), on_device, hash(random.getstate()[1]), of_bytes(keys) ^ place]


def of_bytes(state: Tensor) -> int:
    """The same for a small tensor on the CPU."""
    return zlib.crc32(state.numpy().tobytes())


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values in nested containers by name; of any other object its type's name."""
    if isinstance(value, Mapping):
        for key in value:
            yield from leaves(f"{name}.{key}", value[key])
    elif isinstance(value, (list, tuple)):
        for place, one in enumerate(value):
            yield from leaves(f"{name}[{place}]", one)
    elif value is None or isinstance(value, (Tensor, bool, int, float, str, torch.dtype)):
        yield name, value
    else:
        yield name, type(value).__name__


def kind(value: Any) -> str:
    """The properties of a leaf that can be told without its elements."""
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)


@dataclass(frozen=True)
class Sketch:
    """Sums over a tensor that tell its distance from another of the same shape.

    Attributes:
        kind: see `kind`.
        bits: its digest.
        norm: of a floating-point tensor, −1 of others.
        projections: on random signs.
    """

    kind: str
    bits: int
    norm: float = -1.0
    projections: tuple[float, ...] = ()

    def distance(self, other: Sketch) -> float:
        """The tensors' distance by their norm; infinite where one is of another shape, of whole numbers, or alone not finite."""
        if self.bits == other.bits and self.kind == other.kind:
            return 0.0
        if self.kind != other.kind or self.norm < 0 or math.isfinite(self.norm) != math.isfinite(other.norm):
            return math.inf
        if not math.isfinite(self.norm):
            return 0.0
        squares = [(a - b) ** 2 for a, b in zip(self.projections, other.projections, strict=True)]
        return math.sqrt(sum(squares) / len(squares)) / max(self.norm, other.norm, 1e-300)


@torch.no_grad()
def sketch(value: Any) -> Sketch:
    """The sketch of a leaf."""
    if not isinstance(value, Tensor):
        return Sketch(kind(value), 0)
    if not value.is_floating_point():
        return Sketch(kind(value), int(digest(value)))
    wide, generator = (
        (value if value.layout == torch.strided else value.to_dense()).detach().reshape(-1).double(),
        torch.Generator().manual_seed(1),
    )
    projections = [0.0] * _SKETCHED
    for part in wide.split(_PART):
        signs = torch.randint(2, (_SKETCHED, part.numel()), generator=generator).to(part.device).double() * 2 - 1
        projections = [a + b for a, b in zip(projections, (signs @ part).tolist(), strict=True)]
    return Sketch(kind(value), int(digest(value)), float(wide.norm()), tuple(projections))


def rounding(value: Any) -> float:
    """The relative distance that rounding alone makes between replicas, which other kernels may have computed."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return 0.0
    return (16 if value.element_size() > 2 else 0.1) * torch.finfo(value.dtype).eps
