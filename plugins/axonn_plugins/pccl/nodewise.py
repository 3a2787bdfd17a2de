"""Two levels on accelerators: within a node the vendor's own collective, between nodes a program among peers.

Section 6.2.1 of the dissertation without its final shuffle: within a node there is one small collective for each node's
row of blocks, all in one group, so that what was exchanged between nodes lies where it belongs from the start. The C++ `Route`
does both levels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from axonn_plugins.pccl.algorithms import BETWEEN
from axonn_plugins.pccl.algorithms.flat import flat
from axonn_plugins.pccl.algorithms.tiny import tiny
from axonn_plugins.pccl.choice import Choice
from axonn_plugins.pccl.device import Layout, Plan, plan
from axonn_plugins.pccl.program import block_lengths

_PREFIX = "hierarchical_"


def even(nodes: Sequence[Sequence[int]]) -> bool:
    """True if this way is open: nodes of as many ranks each, more than one, that follow each other in the group."""
    width = len(nodes[0])
    return width > 1 and all(list(node) == list(range(node[0], node[0] + width)) for node in nodes)


class Nodewise:
    """The part between nodes of one rank's hierarchical collectives.

    Args:
        rank: this rank.
        nodes: `even` ones.
    """

    def __init__(self, rank: int, nodes: Sequence[Sequence[int]]) -> None:
        self.nodes = nodes
        self.here = next(number for number, node in enumerate(nodes) if rank in node)
        self.width = len(nodes[0])
        self.lane = list(nodes[self.here]).index(rank)
        self.peers = [node[self.lane] for node in nodes]

    def layout(self, collective: str, elements: int) -> Layout:
        """Where the blocks lie that a lane exchanges between nodes.

        Args:
            collective: its name.
            elements: of all blocks of all ranks.
        """
        count = len(self.nodes)
        if collective == "all_reduce":  # of the share of the node's sums that each of its ranks has
            lengths = block_lengths(-(-elements // self.width), count)
            starts = tuple(sum(lengths[:number]) for number in range(count))
            return Layout(tuple(lengths), starts, starts)
        length = elements // (count * self.width)
        if collective == "all_gather":
            return Layout((length,) * count, (0,), tuple(peer * length for peer in self.peers))
        return Layout((length,) * count, tuple(number * length for number in range(count)), (0,))

    def plan(self, collective: str, choice: Choice) -> Plan:
        """The plan among the ranks of a lane."""
        return plan(self._maker(collective, choice), self.here, len(self.nodes))

    def _maker(self, collective: str, choice: Choice) -> Callable[[int], Any]:
        """The maker of the algorithm's program between nodes, where each is one rank."""
        between = choice.algorithm.removeprefix(_PREFIX).split("_")[0]
        make = tiny if between == "doubling" else partial(flat, pattern=BETWEEN[between])
        count = len(self.nodes)
        return lambda node: make(collective, node, count, [[each] for each in range(count)], choice.chunks)


def covers(choice: Choice) -> bool:
    """True if a choice has two levels."""
    return choice.algorithm.startswith(_PREFIX)
