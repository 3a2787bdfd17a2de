"""Faults of nodes, ranks and links, drawn from a seed; each is undone after a while."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from axonn_plugins.cluster.switch import INTERFACE
from axonn_recipes.soak_test.agents import Agents

_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1


@dataclass(frozen=True)
class Fault:
    """A fault that is to come.

    Attributes:
        kind: a key of `KINDS`.
        node: on which.
        seconds: until it is undone.
        after: seconds of peace before it.
    """

    kind: str
    node: int
    seconds: float
    after: float


def kill_a_rank(agents: Agents, fault: Fault) -> None:
    """SIGKILL to one rank, whose agent then starts all anew."""
    agents.send(agents.ranks(fault.node)[-1:], signal.SIGKILL)


def lose_a_node(agents: Agents, fault: Fault) -> None:
    """SIGKILL to an agent and its ranks; the node comes back later."""
    agents.lose(fault.node)
    time.sleep(fault.seconds)
    agents.start(fault.node)


def lose_a_node_in_silence(agents: Agents, fault: Fault) -> None:
    """The same where nobody hears of it, as when power fails: its link is down first."""
    with link_down(agents, fault.node):
        agents.lose(fault.node)
        time.sleep(fault.seconds)
    agents.start(fault.node)


def stop_a_rank(agents: Agents, fault: Fault) -> None:
    """SIGSTOP to one rank, which goes on later."""
    _stop(agents, agents.ranks(fault.node)[-1:], fault.seconds)


def stop_a_node(agents: Agents, fault: Fault) -> None:
    """SIGSTOP to an agent and its ranks, which go on later."""
    _stop(agents, agents.processes(fault.node), fault.seconds)


def part_a_node(agents: Agents, fault: Fault) -> None:
    """A node's link is down, and up again later."""
    with link_down(agents, fault.node):
        time.sleep(fault.seconds)


def slow_links(agents: Agents, fault: Fault) -> None:
    """The switch works a fifth of the time."""
    over = time.monotonic() + fault.seconds
    try:
        while time.monotonic() < over:
            os.kill(agents.cluster.switch.pid, signal.SIGSTOP)
            time.sleep(0.04)
            os.kill(agents.cluster.switch.pid, signal.SIGCONT)
            time.sleep(0.01)
    finally:
        os.kill(agents.cluster.switch.pid, signal.SIGCONT)


KINDS: dict[str, Callable[[Agents, Fault], None]] = {
    "kill a rank": kill_a_rank,
    "lose a node": lose_a_node,
    "lose a node in silence": lose_a_node_in_silence,
    "stop a rank": stop_a_rank,
    "stop a node": stop_a_node,
    "part a node": part_a_node,
    "slow links": slow_links,
}


def drawn(seed: int, nodes: int, every: float) -> Iterator[Fault]:
    """Faults without end, the same for a seed: all kinds in turn, in an order of its own each time."""
    draw = random.Random(seed)
    while True:
        for kind in draw.sample(list(KINDS), len(KINDS)):
            yield Fault(kind, draw.randrange(nodes), draw.uniform(1.0, 20.0), draw.uniform(0.3, 1.7) * every)


def _stop(agents: Agents, pids: list[int], seconds: float) -> None:
    agents.send(pids, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        agents.send(pids, signal.SIGCONT)


@contextmanager
def link_down(agents: Agents, node: int) -> Iterator[None]:
    """A node's link is down within the block."""
    _in_node(agents, node, lambda: _set_up(False))
    try:
        yield
    finally:
        _in_node(agents, node, lambda: _set_up(True))


def _in_node(agents: Agents, node: int, function: Callable[[], None]) -> None:
    """Run a function in a node, of which a thread of its own is enough."""

    def enter_and_run() -> None:
        agents.cluster.switch.enter(node)
        function()

    thread = threading.Thread(target=enter_and_run)
    thread.start()
    thread.join()


def _set_up(up: bool) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        name = INTERFACE.encode()
        flags = struct.unpack("16sh", fcntl.ioctl(control, _GET_FLAGS, struct.pack("16sh", name, 0)))[1]
        flags = flags | _UP if up else flags & ~_UP
        fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sh", name, flags))
