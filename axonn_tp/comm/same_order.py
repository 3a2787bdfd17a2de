"""Layers that ranks of z call in one order: looked at in fewer and fewer training passes.

A mixture by hand, whose rows say which layers are called, may call as many of one shape on each rank, but others: their weights would be
gathered from parts of both without a word. (Where numbers or shapes differ, ranks wait, and `axonn_tp.comm.stalls` tells.)
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch

from axonn_tp.comm.overlap import Gathers, in_backward
from axonn_tp.comm.telling import Telling


class _Seen:
    """Passes of one model's gathers."""

    def __init__(self, gathers: Gathers) -> None:
        self.passes, self.order = 0, 0
        self.telling = Telling(gathers.mesh.group("z"), "order of layers")


class SameOrder:
    """Looks at a model's training passes.

    Attributes:
        looks: False where a host does.
    """

    def __init__(self) -> None:
        self.looks = True
        self._seen: WeakKeyDictionary[Gathers, _Seen] = WeakKeyDictionary()

    def __deepcopy__(self, memo: dict) -> SameOrder:
        """A copied model's passes are its own."""
        made = SameOrder()
        made.looks = self.looks
        return made

    def passed(self, all_gathers: Iterable[Gathers]) -> None:
        """A forward of the model ends.

        Raises:
            ValueError: ranks of z have called other layers; the same on all of them, some passes later.
        """
        if not self.looks or not torch.is_grad_enabled() or in_backward():
            return
        for gathers in all_gathers:
            if gathers.mesh.size("z") > 1:
                self._look(gathers)

    def _look(self, gathers: Gathers) -> None:
        seen = self._seen.get(gathers)
        if seen is None:
            seen = self._seen[gathers] = _Seen(gathers)
        orders = seen.telling.heard()
        if orders is not None and len(set(orders)) > 1:
            ranks = seen.telling.ranks
            odd = next(rank for rank, order in zip(ranks, orders, strict=True) if order != orders[0])
            raise ValueError(
                f"rank {odd} called other layers than rank {ranks[0]} in the model's forward, or in another order, and ranks of z gather their weights "
                "together, so that they computed with parts of each other's; call the same layers on every rank, with a sample's worth of zeros where a "
                'rank has none for one (times 0, so that nothing learns from it), or give a dense layer {"kind": "replicated"} in the plan, and go on '
                "from weights before it"
            )
        if gathers.order == seen.order:
            return  # a pass without any of them, which other ranks may not have made
        seen.order = gathers.order
        seen.passes += 1
        if not seen.passes & (seen.passes - 1):
            seen.telling.tell(str(gathers.order))
