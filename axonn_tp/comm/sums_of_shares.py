"""Weight gradients' reduce-scatters over z while backward runs; small gradients that come one after another share one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from axonn_tp.comm.bundle import Bundle, fits, start_sums_of_shares
from axonn_tp.grid.mesh import Mesh

_WHOLE_AT_ONCE = 4
"""Reduce-scatters under way that hold more than the share they will give."""


class Sums:
    """Reduce-scatters of weight gradients that are under way, by the node of the graph that will wait for each.

    Args:
        mesh: the mesh.
        most: bytes of gradients in a call, of one large gradient more.
    """

    def __init__(self, mesh: Mesh, most: int) -> None:
        self.mesh, self._most = mesh, most
        self._filling: dict[Any, Tensor] = {}
        self._started: dict[Any, tuple[Bundle, int]] = {}
        self._whole: list[Bundle] = []

    def start(self, node: Any, grad: Tensor) -> None:
        """Begin that of a block's gradient, flat, as soon as nothing that follows may join it."""
        held = sum(one.nbytes for one in self._filling.values())
        other_type = any(one.dtype != grad.dtype for one in self._filling.values())
        if other_type or not fits(held, grad.nbytes, self._most):
            self._start_filled()
            held = 0
        self._filling[node] = grad
        if not fits(held + grad.nbytes, 1, self._most):
            self._start_filled()

    def share(self, node: Any) -> Tensor | None:
        """The shard's gradient, waited for; None where no reduce-scatter was begun for the node."""
        self._start_filled()
        bundle, number = self._started.pop(node, (None, 0))
        return None if bundle is None else bundle.take(number)

    def clear(self) -> None:
        """Forget those of a backward that was broken off."""
        self._filling.clear()
        for node in list(self._started):
            self.share(node)

    def _start_filled(self) -> None:
        if not self._filling:
            return
        self._whole = [bundle for bundle in self._whole if bundle.whole]
        if len(self._whole) == _WHOLE_AT_ONCE:
            self._whole.pop(0).wait()
        bundle = start_sums_of_shares(list(self._filling.values()), self.mesh, "z")
        self._whole.append(bundle)
        self._started.update({node: (bundle, number) for number, node in enumerate(self._filling)})
        self._filling.clear()
