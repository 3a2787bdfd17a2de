"""Which collective of an accelerator's tensors is done how: what the C++ backend `Device` asks, once for a size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from axonn_plugins.pccl.algorithms import algorithms
from axonn_plugins.pccl.build import load
from axonn_plugins.pccl.choice import NATIVE, WINDOW, Choice, Measured, choose, prescribed
from axonn_plugins.pccl.device import Layout, Plan, plan, resolve, rows
from axonn_plugins.pccl.nodewise import Nodewise, covers, even
from axonn_plugins.pccl.options import Options
from axonn_plugins.pccl.program import COLLECTIVES, block_lengths


class Executor:
    """Plans one rank's collectives of one group.

    Args:
        inner: the vendor's backend of the group.
        local: the vendor's backend of the ranks of this rank's node, which is `inner` where all are on one; None where
            `axonn_plugins.pccl.nodewise.even` does not hold.
        rank: this rank.
        nodes: the group's ranks by node.
        options: what the user chose.
        measured: what choices rest on; where nothing was measured, the vendor's library has them all.
        window: makes so many bytes that are registered with the vendor's library, on all ranks at once; None: it cannot be done.

    Attributes:
        fixed: a choice that holds whatever was measured.
    """

    def __init__(
        self,
        inner: Any,
        local: Any,
        rank: int,
        nodes: Sequence[Sequence[int]],
        options: Options,
        measured: Measured | None = None,
        window: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.inner, self.local, self.rank, self.options = inner, local, rank, options
        self.nodes = tuple(tuple(node) for node in nodes)
        self.size = sum(map(len, self.nodes))
        self.measured = measured or Measured()
        self.fixed: Choice | None = None
        self.window = window
        self._windows: dict[int, Tensor] = {}
        self._nodewise = Nodewise(rank, self.nodes) if local is not None and even(self.nodes) else None
        self._plans: dict[tuple[str, Choice, bool], Plan] = {}

    def ours(self, collective: int, size: int, native: bool) -> bool:
        """True if a collective is not left to the inner backend.

        Args:
            collective: number in `COLLECTIVES`.
            size: bytes of all blocks.
            native: whether the inner backend can do it.
        """
        return self.choose(COLLECTIVES[collective], size, native).algorithm != NATIVE

    def choose(self, collective: str, size: int, native: bool = True) -> Choice:
        """Choose the algorithm of a collective of `size` bytes, all blocks together; the same on every rank."""
        if self.fixed is not None and (native or self.fixed.algorithm != NATIVE):
            return self.fixed
        found = prescribed(self.options, collective, size, self.size) or self.measured.choose(collective, size, native)
        return found or (Choice(NATIVE) if native else choose(collective, size, self.nodes))

    def route(self, collective: int, elements: int, itemsize: int, sums: bool) -> Any:
        """The C++ `Route` that enqueues a collective.

        Args:
            collective: number in `COLLECTIVES`.
            elements: of all blocks.
            itemsize: bytes of one.
            sums: whether the vendor's library can do its part within a node.
        """
        name = COLLECTIVES[collective]
        choice = self.choose(name, elements * itemsize, native=False)
        if choice.algorithm == WINDOW and not sums:
            choice = choose(name, elements * itemsize, self.nodes)
        if choice.algorithm == WINDOW:
            return load().Route(collective, self.inner, [], 0, None, self._room(2 * elements * itemsize))
        levels = self._nodewise if self._nodewise is not None and covers(choice) and sums else None
        key = name, choice, levels is not None
        if key not in self._plans:
            self._plans[key] = levels.plan(name, choice) if levels is not None else self._plan(name, choice)
        made = self._plans[key]
        if levels is None:
            layout, rank, peers, within = _layout(name, elements, self.size), self.rank, [*range(self.size)], None
        else:
            layout, rank, peers = levels.layout(name, elements), levels.here, levels.peers
            within = self.local, levels.lane, levels.width, [node[0] for node in self.nodes]
        work = made.program.work_slots * max(layout.lengths)
        return load().Route(collective, self.inner, rows(resolve(made, layout), rank, peers), work, within, None)

    def _room(self, size: int) -> Tensor:
        """Registered memory for a call's two sides."""
        assert self.window is not None
        wanted = 1 << (size - 1).bit_length()
        if wanted not in self._windows:
            self._windows[wanted] = self.window(wanted)
        return self._windows[wanted]

    def shutdown(self, abort: bool) -> None:
        """End the node's backend; the group's is the caller's."""
        if self.local is not None and self.local is not self.inner:
            self.local.abort() if abort else self.local.shutdown()

    def _plan(self, name: str, choice: Choice) -> Plan:
        make = algorithms(name, self.size)[choice.algorithm]
        return plan(lambda rank: make(name, rank, self.size, self.nodes, choice.chunks), self.rank, self.size)


def _layout(collective: str, elements: int, size: int) -> Layout:
    lengths = tuple(block_lengths(elements, size))
    starts = tuple(sum(lengths[:block]) for block in range(size))
    own = (0,)
    if collective == "all_gather":
        return Layout(lengths, own, starts)
    return Layout(lengths, starts, own if collective == "reduce_scatter" else starts)
