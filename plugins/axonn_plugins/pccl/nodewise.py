"""Two levels on accelerators: within a node the vendor's own collective, between nodes a program among peers.

Section 6.2.1 of the dissertation without its final shuffle: within a node there is one small collective for each node's
row of blocks, all in one group, so that what was exchanged between nodes lies where it belongs from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from axonn_plugins.pccl.algorithms import BETWEEN
from axonn_plugins.pccl.algorithms.flat import flat
from axonn_plugins.pccl.algorithms.tiny import tiny
from axonn_plugins.pccl.choice import Choice
from axonn_plugins.pccl.device import AVERAGE, COMBINE, Layout, Memory, Plan, execute, grouped, plan, resolve
from axonn_plugins.pccl.program import block_lengths

_PREFIX = "hierarchical_"


def even(nodes: Sequence[Sequence[int]]) -> bool:
    """True if this way is open: nodes of as many ranks each, more than one, that follow each other in the group."""
    width = len(nodes[0])
    return width > 1 and all(list(node) == list(range(node[0], node[0] + width)) for node in nodes)


class Nodewise:
    """The hierarchical collectives of one rank.

    Args:
        inner: the backend of all ranks.
        local: the backend of the ranks of this rank's node, in their order.
        rank: this rank.
        nodes: `even` ones.
    """

    def __init__(self, inner: Any, local: Any, rank: int, nodes: Sequence[Sequence[int]]) -> None:
        self.inner, self.local, self.nodes = inner, local, nodes
        self.here = next(number for number, node in enumerate(nodes) if rank in node)
        self.width = len(nodes[0])
        self.lane = list(nodes[self.here]).index(rank)
        self.peers = [node[self.lane] for node in nodes]
        self._plans: dict[tuple[str, Choice], Plan] = {}

    def all_gather(self, choice: Choice, output: Tensor, input: Tensor) -> None:
        """Between nodes, each lane's blocks to their places; then within the node, row by row, in place."""
        length = input.numel()
        homes = tuple(peer * length for peer in self.peers)
        self._between("all_gather", choice, Layout((length,) * len(homes), (0,), homes), input, output, 0)
        rows = self._rows(output)
        self._gather([(row, row.narrow(0, self.lane * length, length)) for row in rows])

    def reduce_scatter(self, choice: Choice, output: Tensor, input: Tensor, reduction: int) -> None:
        """Within the node row by row, then each lane's sums between nodes."""
        length = output.numel()
        sums = input.new_empty(len(self.nodes) * length)
        self._scatter(list(zip(sums.split(length), self._rows(input), strict=True)), reduction)
        starts = tuple(number * length for number in range(len(self.nodes)))
        layout = Layout((length,) * len(starts), starts, (0,))
        self._between("reduce_scatter", choice, layout, sums, output, reduction)

    def all_reduce(self, choice: Choice, data: Tensor, reduction: int) -> None:
        """Each of a node's ranks gets a share of the node's sums, which is summed between nodes and gathered again."""
        length = -(-data.numel() // self.width)
        whole = data
        if length * self.width != data.numel():
            whole = data.new_zeros(length * self.width)
            whole.narrow(0, 0, data.numel()).copy_(data)
        share = data.new_empty(length)
        self._scatter([(share, whole)], reduction)
        lengths = block_lengths(length, len(self.nodes))
        starts = tuple(sum(lengths[:number]) for number in range(len(lengths)))
        self._between("all_reduce", choice, Layout(tuple(lengths), starts, starts), share, share, reduction)
        self._gather([(whole, share)])
        if whole is not data:
            data.copy_(whole.narrow(0, 0, data.numel()))

    def _gather(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        options = c10d.AllgatherOptions()
        grouped(self.local, [partial(self.local._allgather_base, row, own, options) for row, own in pairs])

    def _scatter(self, pairs: Sequence[tuple[Tensor, Tensor]], reduction: int) -> None:
        options = c10d.ReduceScatterOptions()
        types: Any = dist.ReduceOp.RedOpType
        options.reduceOp = types.SUM if reduction == AVERAGE else types(reduction)  # divided at the very end
        grouped(self.local, [partial(self.local._reduce_scatter_base, own, row, options) for own, row in pairs])

    def _rows(self, whole: Tensor) -> list[Tensor]:
        """The blocks of each node."""
        length = whole.numel() // (len(self.nodes) * self.width)
        return [whole.narrow(0, node[0] * length, self.width * length) for node in self.nodes]

    def _between(
        self, collective: str, choice: Choice, layout: Layout, input: Tensor, output: Tensor, reduction: int
    ) -> None:
        key = collective, choice
        if key not in self._plans:
            self._plans[key] = plan(self._maker(collective, choice), self.here, len(self.nodes))
        memory = Memory(self._plans[key], layout, input, output)
        steps = resolve(self._plans[key], layout)
        execute(steps, memory, self.here, COMBINE[reduction], self.inner, self.peers)

    def _maker(self, collective: str, choice: Choice) -> Callable[[int], Any]:
        """The maker of the algorithm's program between nodes, where each is one rank."""
        between = choice.algorithm.removeprefix(_PREFIX).split("_")[0]
        make = tiny if between == "doubling" else partial(flat, pattern=BETWEEN[between])
        count = len(self.nodes)
        return lambda node: make(collective, node, count, [[each] for each in range(count)], choice.chunks)


def covers(choice: Choice) -> bool:
    """True if a choice has two levels."""
    return choice.algorithm.startswith(_PREFIX)
