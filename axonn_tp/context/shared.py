"""A sequence over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from axonn_tp.context.chunks import HOW, Chunks
from axonn_tp.grid.mesh import Axes

AXIS = "sequence"


@dataclass(frozen=True)
class Shared:
    """A sequence over the ranks of a mesh's axis ``"sequence"``.

    Attributes:
        mesh: has that axis.
        chunks: the sequence.
        how: one of `HOW`; None for what `cheaper` says.
    """

    mesh: Axes
    chunks: Chunks
    how: str | None = None

    def __post_init__(self) -> None:
        if self.how is not None and self.how not in HOW:
            raise ValueError(f"how = {self.how!r} is not known; use {', '.join(map(repr, HOW))} or None")

    @property
    def rank(self) -> int:
        """This rank's place."""
        return self.mesh.rank(AXIS)

    def places(self, device: torch.device) -> Tensor:
        """The places in the padded sequence of this rank's tokens."""
        return places_of(self.chunks, self.chunks.of(self.rank), device)


def places_of(chunks: Chunks, some: Sequence[int], device: torch.device) -> Tensor:
    """The places in the padded sequence of the tokens of some chunks."""
    size = chunks.size
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size, device=device) for chunk in some])
