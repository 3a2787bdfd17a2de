"""A step of any element-wise torch optimizer, a tile at a time, on the state that its whole step would have (000, section 7.2).

The state stays that of whole tensors; a tile sees views of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TILE = 1_800_000
"""Elements of a tile by default, the dissertation's."""
_ALIGNED = 64  # so that vector instructions take the same elements together as without tiles


@dataclass(frozen=True)
class Room:
    """Tensors as large as the updated one that a step needs, its gradient among them.

    Attributes:
        first: in the step that makes the state.
        later: in any other.
    """

    first: int
    later: int

    def elements(self, tile_size: int, first: bool) -> int:
        """Elements updated at a time, so that everything temporary is as large as one tile of gradients."""
        count = max(1, tile_size // (self.first if first else self.later))
        return count - count % _ALIGNED if count > _ALIGNED else count


@dataclass(eq=False)
class Piece:
    """Consecutive elements of a tensor of weights.

    Attributes:
        group: number of its parameter group.
        weights: the whole tensor, on which the optimizer's state is keyed; without holes in memory.
        begin: first element, in the order of memory.
        end: behind the last.
    """

    group: int
    weights: Tensor
    begin: int
    end: int

    @property
    def whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.end - self.begin == self.weights.numel()

    def of(self, tensor: Tensor) -> Tensor:
        """The same elements of a tensor with the strides of the weights, flat."""
        return tensor.detach().as_strided((self.end - self.begin,), (1,), tensor.storage_offset() + self.begin)


def flat(tensor: Tensor) -> Tensor:
    """The elements of a tensor without holes, in their order in memory, so that channels-last stays what it is."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def pieces_of(group: int, weights: Tensor, size: int) -> Iterator[Piece]:
    """Cut a tensor into pieces of `size` elements."""
    for begin in range(0, weights.numel(), size):
        yield Piece(group, weights, begin, min(begin + size, weights.numel()))


def along(value: Any, weights: Tensor) -> bool:
    """Whether a value of the state has an entry for each element of the weights."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == weights.numel()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


@contextmanager
def other_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> Iterator[None]:
    """Give the optimizer other parameter groups for a while."""
    own, optimizer.param_groups = optimizer.param_groups, groups
    try:
        yield
    finally:
        optimizer.param_groups = own


class TiledStep:
    """One step of an optimizer: `tile` for each tile, then `finish`.

    Pieces of one tensor come in their order. What the optimizer counts, in a tensor's state or in a group, it counts once.

    Args:
        optimizer: with its own parameter groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before: dict[Tensor, dict[str, Any]] = {}
        self._options: dict[int, dict[str, Any]] = {}

    def tile(self, pieces: Sequence[tuple[Piece, Tensor]]) -> None:
        """Update pieces by their flat gradients, in the order of memory."""
        lent, held = [], []
        for piece, gradient in pieces:
            weights = self._lend(piece)
            held.append(weights.grad)
            weights.grad = gradient.as_strided(weights.shape, weights.stride(), gradient.storage_offset())
            lent.append(weights)
        options = {
            number: {
                **self._optimizer.param_groups[number],
                "params": [weights for (piece, _), weights in zip(pieces, lent, strict=True) if piece.group == number],
            }
            for number in dict.fromkeys(piece.group for piece, _ in pieces)
        }
        with other_groups(self._optimizer, list(options.values())):
            self._optimizer.step()
        for (piece, _), weights, own in zip(pieces, lent, held, strict=True):
            weights.grad = own
            self._take_back(piece, weights)
        self._options |= options

    def finish(self) -> None:
        """Take over what the optimizer changed in its groups."""
        for number, options in self._options.items():
            self._optimizer.param_groups[number].update({k: v for k, v in options.items() if k != "params"})

    def _lend(self, piece: Piece) -> Tensor:
        """What the optimizer updates for the piece; it finds a state there."""
        if piece.whole:
            return piece.weights
        state = self._optimizer.state
        before = self._before.setdefault(piece.weights, dict(state.get(piece.weights, {})))
        weights = piece.of(piece.weights)
        if before:
            state[weights] = {
                key: piece.of(value) if along(value, piece.weights) else _copy(value) for key, value in before.items()
            }
        return weights

    def _take_back(self, piece: Piece, weights: Tensor) -> None:
        if piece.whole:
            return
        found: Mapping[str, Any] = self._optimizer.state.pop(weights, {})
        state = self._optimizer.state[piece.weights] if found else {}
        for key, value in found.items():
            if along(value, weights):
                if key not in state:
                    state[key] = torch.empty_like(piece.weights, dtype=value.dtype, requires_grad=False)
                if (part := piece.of(state[key])).data_ptr() != value.data_ptr():
                    part.copy_(value)
            elif piece.end == piece.weights.numel():
                state[key] = value
