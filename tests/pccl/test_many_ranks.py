"""Schedules that are shorter, or made sooner, for many ranks: what they do is as before."""

from __future__ import annotations

import pytest

from axonn_plugins.pccl.algorithms import algorithms
from axonn_plugins.pccl.algorithms.hierarchical import hierarchical
from axonn_plugins.pccl.algorithms.tiny import all_sum
from axonn_plugins.pccl.builder import Builder
from tests.pccl.test_algorithms import DATA, UNEVEN, checked, node_major, phases


def test_many_steps_between_nodes_go_on_together_within_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes and steps between nodes as when each goes on by itself, in fewer messages."""
    nodes = node_major(9, 2)
    for collective in DATA:
        alone = checked("hierarchical_ring_direct", collective, nodes, chunks=2)
        with monkeypatch.context() as patch:
            patch.setitem(hierarchical.__globals__, "MOST_GROUPS", 4)
            joined = checked("hierarchical_ring_direct", collective, nodes, chunks=2)
        assert (joined.sent, joined.out) == (alone.sent, alone.out)
        # Of 9 groups of blocks 3 remain, each of two chunks.
        assert alone.messages[0] - joined.messages[0] == phases(collective) * 2 * (9 - 3)


@pytest.mark.parametrize("nodes", [*UNEVEN, node_major(4, 2), (range(13),)])
def test_data_that_move_together_move_as_block_by_block(nodes) -> None:
    size = sum(map(len, nodes))
    for rank in range(size):
        builder = Builder("all_reduce", rank, size, 2, near=next(node for node in nodes if rank in node))
        all_sum(builder, [member for node in nodes for member in node], range(size))
        builder.keep(range(size))
        assert builder.finish() == algorithms("all_reduce", size)["tiny"]("all_reduce", rank, size, nodes, 2)
