"""The simulator agrees with closed forms, and one node with all."""

from __future__ import annotations

import pytest

from axonn_plugins.config import ConfigError
from axonn_plugins.pccl.algorithms import algorithms
from axonn_plugins.pccl.clusters import CLUSTERS
from axonn_plugins.pccl.simulate import Machine, full, symmetric
from axonn_plugins.pccl.simulate_cli import main
from axonn_plugins.pccl.sweep import Timers, sweep

FLAT = Machine(
    nics=1, nic_bandwidth=1e9, far_latency=1e-5, near_bandwidth=8e9, near_latency=1e-6, overhead=0, reduce_bandwidth=2e9
)
SHARED = Machine(
    nics=2,
    nic_bandwidth=1e9,
    far_latency=1e-5,
    near_bandwidth=8e9,
    near_latency=1e-6,
    overhead=2e-7,
    reduce_bandwidth=2e9,
)


def programs_of(name: str, collective: str, nodes, chunks: int = 1):
    size = sum(len(node) for node in nodes)
    make = algorithms(collective, size)[name]
    return [make(collective, rank, size, nodes, chunks) for rank in range(size)]


def node_major(nodes: int, ranks: int):
    return [range(node * ranks, (node + 1) * ranks) for node in range(nodes)]


def test_closed_forms_with_one_rank_a_node() -> None:
    """alpha * steps + beta * bytes, and gamma * bytes for what is summed."""
    size, block = 8, 80_000
    alpha, bytes_time, sum_time = 1e-5, 7 * block / 1e9, 7 * block / 2e9
    expected = {
        ("ring", "all_gather"): 7 * alpha + bytes_time,
        ("recursive", "all_gather"): 3 * alpha + bytes_time,
        ("bruck", "all_gather"): 3 * alpha + bytes_time,
        ("direct", "all_gather"): alpha + bytes_time,
        ("ring", "reduce_scatter"): 7 * alpha + bytes_time + sum_time,
        ("recursive", "reduce_scatter"): 3 * alpha + bytes_time + sum_time,
        ("ring", "all_reduce"): 14 * alpha + 2 * bytes_time + sum_time,
        ("tiny", "all_reduce"): 3 * alpha + 3 * size * block / 1e9 + 3 * size * block / 2e9,
    }
    nodes = node_major(size, 1)
    for (name, collective), seconds in expected.items():
        found = full(programs_of(name, collective, nodes), nodes).seconds(FLAT, [block] * size)
        assert found == pytest.approx(seconds, rel=1e-9), (name, collective)


def test_ranks_of_a_node_share_its_interface() -> None:
    """Four lanes on one interface take as long between nodes as one lane with all their bytes."""
    nodes, block = node_major(4, 4), 80_000
    found = full(programs_of("hierarchical_log_direct", "all_gather", nodes), nodes).seconds(FLAT, [block] * 16)
    between = 2e-5 + 4 * 3 * block / 1e9
    assert between < found < between + 1e-6 + 12 * block / 8e9 + 1e-9
    flat = full(programs_of("recursive", "all_gather", nodes), nodes).seconds(FLAT, [block] * 16)
    assert flat > 4 * 12 * block / 1e9


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("shape", [(4, 2), (3, 3), (5, 2)], ids=str)
def test_one_node_stands_for_all(collective: str, shape: tuple[int, int]) -> None:
    nodes, size = node_major(*shape), shape[0] * shape[1]
    for name, make in algorithms(collective, size).items():
        if name == "tiny" or "doubling" in name:
            continue  # where nodes are no power of two, some fold and some do not
        for chunks in (1, 3):
            every = full(programs_of(name, collective, nodes, chunks), nodes)
            one = symmetric(make, collective, *shape, chunks)
            for block in (600, 600_000):
                expected = every.seconds(SHARED, [block] * size)
                assert one.seconds(SHARED, [block] * size) == pytest.approx(expected, rel=0.02), (name, chunks)


def test_a_sweep_has_the_papers_shape_where_bandwidth_binds() -> None:
    """The published hierarchy loses to the library's ring on large data and few ranks; the best choice never does."""
    for cluster in CLUSTERS.values():
        found = sweep(Timers(cluster), step=0.0, processes=[32], sizes=[16, 1024])
        for collective in ("all_gather", "reduce_scatter"):
            assert found.speedup("PCCL", cluster.library, collective, 32, 1024) < 0.9
            assert found.speedup("ours", cluster.library, collective, 32, 1024) >= 1
            assert found.speedup("PCCL", "Cray MPICH", collective, 32, 1024) > 1.5


def test_an_unknown_cluster_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="frontier, perlmutter"):
        main(["--cluster", "summit", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())
