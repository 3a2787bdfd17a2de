"""All ranks' programs as one graph: which message is which, what precedes what, how long and how heavy it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from axonn_plugins.pccl.program import Kind, Program, cells, chunk_bounds, tags

Event = tuple[int, int]
"""(rank, index of its operation)."""


class ProgramError(AssertionError):
    """The programs are wrong; says which operation of which rank."""


@dataclass
class Report:
    """The costs of a collective.

    Attributes:
        steps: messages on the longest chain of messages that wait for each other.
        far_steps: messages between nodes on the chain that has most of them.
        sent: elements sent by each rank.
        messages: messages sent by each rank.
        out: elements each node sends to others.
        into: elements each node receives from others.
    """

    steps: int = 0
    far_steps: int = 0
    sent: list[int] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)
    out: list[int] = field(default_factory=list)
    into: list[int] = field(default_factory=list)


def match(programs: Sequence[Program]) -> dict[Event, Event]:
    """The SEND of every RECV and REDUCE.

    Raises:
        ProgramError: a message has one end only, or its ends name different blocks.
    """
    sends: dict[tuple[int, int, int], Event] = {}
    receives: dict[tuple[int, int, int], Event] = {}
    for rank, program in enumerate(programs):
        for index, (op, tag) in enumerate(zip(program.ops, tags(program), strict=True)):
            if op.kind is Kind.SEND:
                sends[rank, op.peer, tag] = rank, index
            elif op.kind is not Kind.COPY:
                receives[op.peer, rank, tag] = rank, index
    if sends.keys() != receives.keys():
        first = min(sends.keys() ^ receives.keys())
        raise ProgramError(f"message {first[2]} from rank {first[0]} to {first[1]} has one end only")
    for (source, to, tag), (rank, index) in receives.items():
        receiver, sender = programs[rank].ops[index], programs[source].ops[sends[source, to, tag][1]]
        sent = [block for _, _, block in cells(sender.src)], sender.chunk
        taken = [block for _, _, block in cells(receiver.dst)], receiver.chunk
        if sent != taken:
            raise ProgramError(f"message {tag} from rank {source} to {to}: {sent} is sent, {taken} expected")
    return {receive: sends[pair] for pair, receive in receives.items()}


class Graph:
    """Beginnings and ends of all operations, and what precedes what.

    Args:
        programs: one per rank.
        rendezvous: whether a SEND ends only after its receive has begun, as where the receiver takes the data itself;
            otherwise it ends by itself.
    """

    def __init__(self, programs: Sequence[Program], senders: dict[Event, Event], rendezvous: bool) -> None:
        self.first = [0]
        for program in programs:
            self.first.append(self.first[-1] + len(program.ops))
        self.followers: list[list[int]] = [[] for _ in range(2 * self.first[-1])]
        for rank, program in enumerate(programs):
            for index, op in enumerate(program.ops):
                begin = self.begin((rank, index))
                self.followers[begin].append(begin + 1)
                for wait in op.after:
                    if wait >= index:
                        raise ProgramError(f"operation {index} of rank {rank} waits for {wait}, which comes later")
                    self.followers[self.begin((rank, wait)) + 1].append(begin)
        for receive, send in senders.items():
            self.followers[self.begin(send)].append(self.begin(receive) + 1)
            if rendezvous:
                self.followers[self.begin(receive)].append(self.begin(send) + 1)

    def begin(self, event: Event) -> int:
        """The number of an operation's beginning; its end is the next one."""
        return 2 * (self.first[event[0]] + event[1])

    def order(self) -> list[int]:
        """Beginnings and ends in an order in which they can happen; shorter than all where there is a deadlock."""
        waits = [0] * len(self.followers)
        for followers in self.followers:
            for follower in followers:
                waits[follower] += 1
        ready = deque(number for number, count in enumerate(waits) if not count)
        order = []
        while ready:
            number = ready.popleft()
            order.append(number)
            for follower in self.followers[number]:
                waits[follower] -= 1
                if not waits[follower]:
                    ready.append(follower)
        return order

    def precedes(self, first: Event, then: Event) -> bool:
        """True if one operation has always ended before the other begins."""
        goal, seen, stack = self.begin(then), set(), [self.begin(first) + 1]
        while stack:
            number = stack.pop()
            if number == goal:
                return True
            if number not in seen:
                seen.add(number)
                stack += self.followers[number]
        return False


def report(
    programs: Sequence[Program],
    nodes: Sequence[Sequence[int]] = (),
    lengths: Sequence[int] = (),
    senders: dict[Event, Event] | None = None,
) -> Report:
    """Steps and volumes of programs that are right; see `axonn_plugins.pccl.check.check`."""
    size = len(programs)
    lengths = lengths or [programs[0].chunks] * size
    nodes = nodes or [range(size)]
    home = {rank: number for number, node in enumerate(nodes) for rank in node}
    found = Report(sent=[0] * size, messages=[0] * size, out=[0] * len(nodes), into=[0] * len(nodes))
    for rank, program in enumerate(programs):
        for op in program.ops:
            if op.kind is not Kind.SEND:
                continue
            bounds = (chunk_bounds(lengths[block], program.chunks, op.chunk) for _, _, block in cells(op.src))
            elements = sum(end - first for first, end in bounds)
            found.messages[rank] += 1
            found.sent[rank] += elements
            if home[rank] != home[op.peer]:
                found.out[home[rank]] += elements
                found.into[home[op.peer]] += elements
    senders = match(programs) if senders is None else senders
    graph = Graph(programs, senders, rendezvous=False)
    order = graph.order()
    found.steps = _longest(graph, order, dict.fromkeys(senders, 1))
    found.far_steps = _longest(
        graph, order, {event: int(home[event[0]] != home[senders[event][0]]) for event in senders}
    )
    return found


def _longest(graph: Graph, order: list[int], weights: dict[Event, int]) -> int:
    """The heaviest path, where the end of each receive has its weight."""
    weight = [0] * len(graph.followers)
    for event, each in weights.items():
        weight[graph.begin(event) + 1] = each
    depth = [0] * len(graph.followers)
    # A receive that is ready early does not weigh: only the way through its SEND does, so its weight is added there.
    for number in order:
        for follower in graph.followers[number]:
            through = depth[number] + (weight[follower] if follower != number + 1 else 0)
            depth[follower] = max(depth[follower], through)
    return max(depth, default=0)
