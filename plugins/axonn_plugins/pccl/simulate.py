"""Times of programs on a machine, under an alpha-beta model with shared network interfaces.

A message occupies its sender's port for its overhead and its bytes, travels for the latency, and occupies its
receiver's port for its bytes, which overlap with the sender's where the port is free. Between nodes the port is the
network interface of the rank's node that the rank is mapped to, which several ranks may share; within a node it is the
rank's own. Ports serve messages first come, first served: for messages of one size that start together, as those of
the lanes of a hierarchy do, the last ends exactly when it would if they shared the port fairly, the first ends earlier.

A program is built once and timed for many sizes. Where all nodes are alike, one node is enough (`symmetric`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from axonn_plugins.pccl.algorithms import Algorithm
from axonn_plugins.pccl.graph import Event, match
from axonn_plugins.pccl.program import Kind, Op, Program, Span, chunk_bounds, tags


@dataclass(frozen=True)
class Machine:
    """Parameters of a cluster, in seconds and bytes per second; bandwidths are for one direction.

    Attributes:
        nics: network interfaces of a node; its ranks are mapped to them in order, as many to each.
        nic_bandwidth: of one interface.
        far_latency: of a message between nodes.
        near_bandwidth: of one rank to and from the others of its node, all together.
        near_latency: of a message within a node.
        overhead: time for which a message occupies its sender's port besides its bytes.
        reduce_bandwidth: bytes of a message that a rank combines with its own in a second.
        copy_bandwidth: bytes of a message from another node that are copied on in a second once they are there, which keeps
            no port busy.
    """

    nics: int
    nic_bandwidth: float
    far_latency: float
    near_bandwidth: float
    near_latency: float
    overhead: float
    reduce_bandwidth: float
    copy_bandwidth: float = math.inf


class Timed:
    """Programs that are to be timed.

    Args:
        programs: of the ranks simulated.
        homes: node of each of these ranks, and its index within the node, and the ranks of that node.
        receivers: for each SEND, the receive of a simulated rank that its message ends in.
        far: for each SEND, whether it leaves its node.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        homes: Sequence[tuple[int, int, int]],
        receivers: dict[Event, Event],
        far: dict[Event, bool],
    ) -> None:
        self.programs, self.homes, self.receivers, self.far = programs, homes, receivers, far
        self._followers: list[list[list[int]]] = []
        for program in programs:
            followers: list[list[int]] = [[] for _ in program.ops]
            for index, op in enumerate(program.ops):
                for wait in op.after:
                    followers[wait].append(index)
            self._followers.append(followers)

    def seconds(self, machine: Machine, lengths: Sequence[int]) -> float:
        """Time until the last rank is done; `lengths` are the bytes of each block."""
        sizes = _Sizes(self.programs[0], lengths)
        waits = [[len(op.after) + (op.kind in (Kind.RECV, Kind.REDUCE)) for op in each.ops] for each in self.programs]
        free: dict[tuple[int, ...], float] = {}
        events: list[tuple[float, int, bool, Event]] = []
        count = 0
        end = 0.0

        def push(time: float, leaves: bool, event: Event) -> None:
            nonlocal count
            count += 1
            heapq.heappush(events, (time, count, leaves, event))

        def occupy(port: tuple[int, ...], time: float, duration: float) -> float:
            free[port] = max(time, free.get(port, 0.0)) + duration
            return free[port]

        def done(rank: int, index: int, time: float) -> None:
            nonlocal end
            end = max(end, time)
            for follower in self._followers[rank][index]:
                arrive(rank, follower, time)

        def arrive(rank: int, index: int, time: float) -> None:
            waits[rank][index] -= 1
            if not waits[rank][index]:
                push(time, True, (rank, index))

        for rank, each in enumerate(waits):
            for index, left in enumerate(each):
                if not left:
                    push(0.0, True, (rank, index))
        while events:
            time, _, leaves, (rank, index) = heapq.heappop(events)
            op = self.programs[rank].ops[index]
            if not leaves:  # the head of a message is at the receiver's node
                far = self.far[rank, index]
                to, receive = self.receivers[rank, index]
                bandwidth = machine.nic_bandwidth if far else machine.near_bandwidth
                arrive(to, receive, occupy(self._port(to, far, machine, 0), time, sizes.of(op, op.src) / bandwidth))
            elif op.kind is Kind.SEND:
                far = self.far[rank, index]
                size = sizes.of(op, op.src)
                bandwidth = machine.nic_bandwidth if far else machine.near_bandwidth
                gone = occupy(self._port(rank, far, machine, 1), time, machine.overhead + size / bandwidth)
                latency = machine.far_latency + size / machine.copy_bandwidth if far else machine.near_latency
                push(gone - size / bandwidth + latency, False, (rank, index))
                done(rank, index, gone)
            elif op.kind is Kind.REDUCE:
                done(rank, index, occupy((rank,), time, sizes.of(op, op.dst) / machine.reduce_bandwidth))
            else:
                done(rank, index, time)
        return end

    def _port(self, rank: int, far: bool, machine: Machine, out: int) -> tuple[int, ...]:
        node, local, ranks = self.homes[rank]
        return (node, local * machine.nics // ranks, out, 1) if far else (rank, out, 0)


class _Sizes:
    """Bytes of spans."""

    def __init__(self, program: Program, lengths: Sequence[int]) -> None:
        self._before: dict[int, list[int]] = {}
        for chunk in [-1, *range(program.chunks)]:
            total = [0]
            for length in lengths:
                first, end = chunk_bounds(length, program.chunks, chunk)
                total.append(total[-1] + end - first)
            self._before[chunk] = total

    def of(self, op: Op, spans: tuple[Span, ...]) -> int:
        before = self._before[op.chunk]
        return sum(before[span.block + span.count] - before[span.block] for span in spans)


def full(programs: Sequence[Program], nodes: Sequence[Sequence[int]]) -> Timed:
    """All ranks, on any nodes."""
    homes = {rank: (number, local, len(node)) for number, node in enumerate(nodes) for local, rank in enumerate(node)}
    receivers = {send: receive for receive, send in match(programs).items()}
    far = {send: homes[send[0]][0] != homes[receive[0]][0] for send, receive in receivers.items()}
    return Timed(programs, [homes[rank] for rank in range(len(programs))], receivers, far)


def symmetric(make: Algorithm, collective: str, nodes: int, ranks: int, chunks: int = 1) -> Timed:
    """`nodes` nodes of `ranks` ranks each, of which only the first is simulated.

    The rings, Bruck's algorithm, the exchanges of powers of two and the hierarchies of these look the same from all
    nodes: what node 0 does to node i, node -i does to node 0 (or, where peers are found by exclusive or, node i does).
    So a message from node 0 to a rank of
    another node ends when the like message ends at the like rank of node 0, and the time is that of all nodes.
    """
    size = nodes * ranks
    grouping = [range(node * ranks, (node + 1) * ranks) for node in range(nodes)]
    programs = [make(collective, rank, size, grouping, chunks) for rank in range(ranks)]
    numbers = [tags(program) for program in programs]
    receives: dict[tuple[int, int, int], Event] = {}
    for rank, program in enumerate(programs):
        for index, op in enumerate(program.ops):
            if op.kind in (Kind.RECV, Kind.REDUCE):
                receives[op.peer, rank, numbers[rank][index]] = rank, index
    receivers: dict[Event, Event] = {}
    far: dict[Event, bool] = {}
    for rank, program in enumerate(programs):
        for index, op in enumerate(program.ops):
            if op.kind is Kind.SEND:
                node, local = divmod(op.peer, ranks)
                mirrored = (-node % nodes * ranks + rank, local, numbers[rank][index])
                same = (node * ranks + rank, local, numbers[rank][index])
                receivers[rank, index] = receives[mirrored] if mirrored in receives else receives[same]
                far[rank, index] = node > 0
    return Timed(programs, [(0, local, ranks) for local in range(ranks)], receivers, far)


Timer = Callable[[Machine, int], float]
"""(machine, total bytes) -> seconds."""


def timer(make: Algorithm, collective: str, nodes: int, ranks: int, chunks: int = 1) -> Timer:
    """Times one algorithm on like nodes for any size of the whole (what an all-gather yields)."""
    timed = symmetric(make, collective, nodes, ranks, chunks)
    size = nodes * ranks
    return lambda machine, total: timed.seconds(machine, [-(-total // size)] * size)
