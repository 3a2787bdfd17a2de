"""Where the kept elements of a pruned tensor are: one index, shared by all of its compressed state (000, section 4.1.2).

The dissertation stores 32-bit positions in the flattened tensor. Within blocks of 65,536 elements 16 bits are enough, and
one count a block says which block is meant: half the bytes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

BLOCK = 2**16
"""Elements whose offsets fit into 16 bits."""


class Index:
    """Positions of the kept elements of a flattened tensor, ascending.

    Args:
        positions: 1-D int64, ascending, each once, in [0, numel).
        numel: elements of the tensor.
        form: "offsets", 2 bytes an element and 8 a block; "positions", 4 bytes an element, the dissertation's form and the
            reference; "auto", whichever takes fewer bytes.

    Attributes:
        numel: elements of the tensor.
        kept: how many of them are kept.

    Raises:
        ValueError: an unknown form, or more elements than 32 bits can number for "positions".
    """

    def __init__(self, positions: Tensor, numel: int, form: str = "auto") -> None:
        if form not in ("auto", "offsets", "positions"):
            raise ValueError(f"form = {form!r} is not a form of an index; use 'auto', 'offsets' or 'positions'")
        if form == "positions" and numel > 2**31 - 1:
            raise ValueError(f"a tensor of {numel:,} elements needs form = 'offsets', not 'positions'")
        self.numel, self.kept = numel, positions.numel()
        blocks = -(-numel // BLOCK)
        if form == "auto":
            short = 2 * self.kept + 8 * (blocks + 1)
            form = "offsets" if short <= 4 * self.kept or numel > 2**31 - 1 else "positions"
        self._starts: Tensor | None = None
        if form == "offsets":
            edges = torch.arange(blocks + 1, device=positions.device) * BLOCK
            self._starts = torch.searchsorted(positions, edges)
            self._stored = (positions % BLOCK).to(torch.uint16)
        else:
            self._stored = positions.to(torch.int32)

    @staticmethod
    def from_mask(mask: Tensor, form: str = "auto") -> Index:
        """The index of what a mask keeps.

        Args:
            mask: boolean, of the tensor's shape.
            form: see `Index`.
        """
        return Index(mask.reshape(-1).nonzero().reshape(-1), mask.numel(), form)

    @property
    def form(self) -> str:
        """Offsets, or positions."""
        return "positions" if self._starts is None else "offsets"

    @property
    def nbytes(self) -> int:
        """Bytes that the index takes."""
        return self._stored.nbytes + (0 if self._starts is None else self._starts.nbytes)

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None]:
        """The tensors that are stored: the offsets (uint16) and where each block begins (int64, blocks + 1), or the positions (int32), None."""
        return self._stored, self._starts

    @cached_property
    def longest(self) -> int:
        """The most kept elements of one block of offsets; all of them in the form of positions."""
        return self.kept if self._starts is None else int(self._starts.diff().amax()) if self.kept else 0

    @cached_property
    def _edges(self) -> list[int]:
        assert self._starts is not None
        return self._starts.tolist()

    def positions(self, begin: int = 0, end: int | None = None) -> Tensor:
        """Positions of the kept elements number `begin` to `end`: int64, ascending."""
        end = self.kept if end is None else end
        wide = self._stored[begin:end].long()
        if self._starts is None:
            return wide
        first, last = bisect_right(self._edges, begin), bisect_left(self._edges, end)
        # On a CPU a sum for each block takes half the time of all blocks' bases repeated, if blocks are long.
        if wide.device.type == "cpu" and (last - first) * 1024 <= end - begin:
            edges = [begin, *self._edges[first:last], end]
            for number, (low, high) in enumerate(pairwise(edges), first - 1):
                wide[low - begin : high - begin] += number * BLOCK
            return wide
        counts = self._starts.clamp(begin, end).diff()
        bases = torch.arange(counts.numel(), device=counts.device) * BLOCK
        return wide.add_(torch.repeat_interleave(bases, counts, output_size=end - begin))

    def mask(self) -> Tensor:
        """The mask that `from_mask` was given, flattened."""
        found = torch.zeros(self.numel, dtype=torch.bool, device=self._stored.device)
        found[self.positions()] = True
        return found

    def compress(self, dense: Tensor, begin: int = 0, end: int | None = None, out: Tensor | None = None) -> Tensor:
        """Kept elements number `begin` to `end` of a flattened tensor, in `out` if that is given."""
        return torch.index_select(dense, 0, self.positions(begin, end), out=out)

    def expand(self, values: Tensor, into: Tensor, begin: int = 0) -> None:
        """Write `values`, which are the kept elements from number `begin` on, to where they belong in a flattened tensor."""
        into.index_copy_(0, self.positions(begin, begin + values.numel()), values)
