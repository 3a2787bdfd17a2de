"""A cluster of nodes emulated on one Linux machine: network namespaces behind a switch with latency and bandwidth.

Ranks of one node talk through loopback, those of two nodes through the switch. A cluster is one process, the switch,
and leaves nothing behind however it or its owner ends. A node reaches the other nodes and nothing else.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

from axonn_plugins.cluster import processes
from axonn_plugins.cluster.launch import launch
from axonn_plugins.cluster.switch import INTERFACE, Switch, Traffic, lacking, read, start, traffic
from axonn_plugins.cluster.units import bits_per_second, cluster_name, nanoseconds, node_count
from axonn_plugins.config import ConfigError

__all__ = ["Cluster", "Traffic", "address", "lacking", "place_rank", "sweep"]

_numbers = itertools.count(1)


class Cluster:
    """An emulated cluster that lives as long as its ``with`` block, and never longer than this process.

    Args:
        nodes: 1 to 64.
        latency: from node to node, one way, such as ``"0.1ms"``.
        bandwidth: of each node in each direction, such as ``"500Mbit"``; None for no limit.
        name: shown by ``axonn cluster status``; no two clusters have the same.
        jitter: the share of the latency, 0 to 1, by which a packet's differs at most, either way.

    Raises:
        ConfigError: an argument is wrong, or, at entry, the machine lacks something.
    """

    def __init__(
        self,
        nodes: int,
        latency: str = "0us",
        bandwidth: str | None = None,
        name: str | None = None,
        jitter: float = 0.0,
    ) -> None:
        if not 0 <= jitter <= 1:
            raise ConfigError(f"jitter = {jitter!r} is not a share; give a number from 0 to 1, such as 0.5")
        self._jitter = round(1000 * jitter)
        self.nodes = node_count(nodes)
        self._latency, self._bandwidth = nanoseconds(latency), bits_per_second(bandwidth)
        self.name = cluster_name(name if name is not None else f"of-{os.getpid()}-{next(_numbers)}")
        self._running: Switch | None = None

    def __enter__(self) -> Cluster:
        self._process = start(self.name, self.nodes, self._latency, self._bandwidth, os.getpid(), self._jitter)
        self._running = read(self._process.pid)
        self._counters = self.switch.counters()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            processes.end(processes.inside(self.switch))
        finally:
            self._running = None
            self._process.kill()
            self._process.wait()

    @property
    def switch(self) -> Switch:
        """The switch behind the cluster.

        Raises:
            RuntimeError: the cluster is not up.
        """
        if self._running is None:
            raise RuntimeError(f'cluster "{self.name}" is not up; use it within its with block')
        return self._running

    def launch(
        self, function: Callable[..., Any], ranks_per_node: int, *arguments: Any, timeout: float | None = None
    ) -> list[Any]:
        """Run `function(*arguments)` on every rank of every node, node-major; see `axonn_plugins.cluster.launch.launch`.

        Returns:
            What each rank returned, by rank.

        Raises:
            ConfigError: `ranks_per_node` is not a positive integer.
        """
        place = place_rank(self.switch, ranks_per_node)
        return launch(function, self.nodes * ranks_per_node, *arguments, timeout=timeout, place=place)

    def bytes(self) -> list[Traffic]:
        """Bytes that each node has sent through and received from the switch so far; works within ranks too."""
        return traffic(self._counters, self.switch.nodes)


def place_rank(switch: Switch, ranks_per_node: int) -> Callable[[int], dict[str, str]]:
    """Make the function by which `axonn_plugins.cluster.launch.launch` puts a rank into its node.

    Raises:
        ConfigError: `ranks_per_node` is not a positive integer.
    """
    if isinstance(ranks_per_node, bool) or not isinstance(ranks_per_node, int) or ranks_per_node < 1:
        raise ConfigError(f"ranks_per_node = {ranks_per_node!r} is not an integer of at least 1; give one that is")

    def place(rank: int) -> dict[str, str]:
        node, local = divmod(rank, ranks_per_node)
        switch.enter(node)
        return {
            **environment(switch),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(ranks_per_node),
            "GROUP_RANK": str(node),
            "MASTER_ADDR": address(0),
        }

    return place


def environment(switch: Switch) -> dict[str, str]:
    """Variables for processes in a node: the interface to use, and the mark by which they are found."""
    return {
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        processes.TOKEN: switch.token,
    }


def address(node: int) -> str:
    """A node's IP address."""
    return f"10.77.0.{node + 1}"


def sweep() -> list[int]:
    """End processes that outlived their cluster, as when its owner was killed; returns them."""
    found = processes.strays()
    processes.end(found)
    return found
