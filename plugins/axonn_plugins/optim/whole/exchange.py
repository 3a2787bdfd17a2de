"""Parameters from the ranks that hold them to those that want them, whole or a part, and back: one call each way for many."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_plugins.optim.whole.spread import Cut, Spread, common
from axonn_tp.grid.regions import Region

Wanted = Mapping[int, Cut]
"""The cut of each parameter that a rank wants, by place in its family: disjoint where it is to go back."""
_Message = list[tuple[int, Region]]


class Exchange:
    """Messages by which some parameters travel to the ranks that want them, and back.

    Args:
        spreads: of each.
        wanted: of each, who wants what.
        rank: this rank's place on the grids.
        group: all ranks of the grids; None: this rank alone.
    """

    def __init__(
        self, spreads: Sequence[Spread], wanted: Sequence[Wanted], rank: int, group: dist.ProcessGroup | None
    ) -> None:
        self._spreads, self._rank, self._group = spreads, rank, group
        self._wanted = wanted
        self._ranks = range(spreads[0].grid.world if spreads else 1)

    def cut(self, number: int, rank: int) -> Cut | None:
        """The cut of a parameter that a rank of its family wants."""
        return self._wanted[number].get(self._spreads[number].family(rank).index(rank))

    def _message(self, source: int, target: int, back: bool) -> Iterator[tuple[int, Region]]:
        """Regions of a source's elements that a target wants; on the way back all that hold an element have it from the target."""
        for number, spread in enumerate(self._spreads):
            givers = spread.family(target) if back else spread.sources(target)
            cut = self.cut(number, target)
            if cut is not None and source in givers:
                found = (common(region, cut) for region in spread.regions(source))
                yield from ((number, part) for part in found if part is not None)

    @cached_property
    def _to(self) -> list[_Message]:
        return [list(self._message(self._rank, other, False)) for other in self._ranks]

    @cached_property
    def _from(self) -> list[_Message]:
        return [list(self._message(other, self._rank, False)) for other in self._ranks]

    @cached_property
    def _back_to(self) -> list[_Message]:
        return [list(self._message(other, self._rank, True)) for other in self._ranks]

    @cached_property
    def _back_from(self) -> list[_Message]:
        return [list(self._message(self._rank, other, True)) for other in self._ranks]

    def sent(self, back: bool) -> int:
        """Elements that this rank sends to others."""
        messages = self._back_to if back else self._to
        return sum(_elements(message) for other, message in enumerate(messages) if other != self._rank)

    def bring(self, parts: Sequence[Tensor]) -> list[Tensor | None]:
        """Fetch the cuts that this rank wants, one of each parameter.

        Args:
            parts: of each, what this rank holds, flat; all of one dtype.

        Returns:
            Of each, the cut in its shape; None: none is wanted here.
        """
        sent = [region.view(parts[number]) for message in self._to for number, region in message]
        received = self._swap(sent, self._to, self._from, parts)
        cuts = [self.cut(number, self._rank) for number in range(len(parts))]
        made = [None if cut is None else parts[0].new_zeros([s.stop - s.start for s in cut]) for cut in cuts]
        for (number, region), values in received:
            whole, cut = made[number], cuts[number]
            assert whole is not None and cut is not None
            whole[_inside(region, cut)] = values.view(region.sizes)
        return made

    def give_back(self, cuts: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
        """Fetch this rank's part of each parameter from those that wanted it: the reverse of `bring`.

        Args:
            cuts: of each, what `bring` gave, changed; all of one dtype.
            like: of each, a flat tensor of what this rank holds, with that dtype and the device.

        Returns:
            Of each, flat; padding is zero.
        """
        sent = []
        for message in self._back_to:
            for number, region in message:
                whole, cut = cuts[number], self.cut(number, self._rank)
                assert whole is not None and cut is not None
                sent.append(whole[_inside(region, cut)])
        parts = [torch.zeros_like(part) for part in like]
        for (number, region), values in self._swap(sent, self._back_to, self._back_from, like):
            region.view(parts[number]).copy_(values.view(region.sizes))
        return parts

    def _swap(
        self, sent: list[Tensor], to: list[_Message], origin: list[_Message], like: Sequence[Tensor]
    ) -> Iterator[tuple[tuple[int, Region], Tensor]]:
        if not self._spreads:
            return iter(())
        flat = torch.cat([part.reshape(-1) for part in sent]) if sent else like[0].new_zeros(0)
        if self._group is not None:
            received = flat.new_empty(sum(map(_elements, origin)))
            dist.all_to_all_single(
                received, flat, list(map(_elements, origin)), list(map(_elements, to)), group=self._group
            )
            flat = received
        pieces = [piece for message in origin for piece in message]
        return zip(pieces, flat.split([math.prod(region.sizes) for _, region in pieces]), strict=True)


def _elements(message: _Message) -> int:
    return sum(math.prod(region.sizes) for _, region in message)


def _inside(region: Region, cut: Cut) -> Cut:
    """A region's place in the tensor of a cut."""
    return tuple(
        slice(at - part.start, at - part.start + size)
        for at, size, part in zip(region.offsets, region.sizes, cut, strict=True)
    )
