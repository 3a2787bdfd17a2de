"""Flat all-gathers among m members as steps; run backwards, each is a reduce-scatter.

Members are numbered 0 to m - 1 and member i starts with part i. A reduce-scatter is the same steps in reverse order
with senders and receivers exchanged: where part k went from i to j, the partial sum of part k comes from j to i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One member's exchange: parts `sends` go to member `to`, parts `receives` come from member `source`."""

    to: int
    sends: tuple[int, ...]
    source: int
    receives: tuple[int, ...]


Pattern = Callable[[int, int], list[Step]]
"""(member, members) -> its steps."""


def ring(member: int, members: int) -> list[Step]:
    """For any m, m - 1 steps, each passing one part to the next member: neighbours only."""
    after, before = (member + 1) % members, (member - 1) % members
    return [
        Step(after, ((member - step) % members,), before, ((before - step) % members,)) for step in range(members - 1)
    ]


def doubling(member: int, members: int) -> list[Step]:
    """log2 m steps for m = 2^k: exchange all one has with the member at distance 1, 2, 4, ...

    Backwards it is recursive halving (Thakur, Rabenseifner, Gropp 2005).
    """
    steps = []
    for bit in range(members.bit_length() - 1):
        distance = 1 << bit
        peer = member ^ distance
        mine, theirs = member & -distance, peer & -distance
        steps.append(
            Step(peer, tuple(range(mine, mine + distance)), peer, tuple(range(theirs, theirs + distance))),
        )
    return steps


def bruck(member: int, members: int, radix: int = 2) -> list[Step]:
    """For any m, ceil(log2 m) steps: at distance d = 1, 2, 4, ... send the min(d, m - d) parts one has had longest.

    Bruck et al. 1997, without its final rotation: a part is received where it belongs. With a larger radix there are
    ceil(log_radix m) rounds of up to radix - 1 steps that wait for earlier rounds only: fewer latencies, more messages.
    """
    steps = []
    distance = 1
    while distance < members:
        for shift in range(distance, min(distance * radix, members), distance):
            count = min(distance, members - shift)
            mine = tuple((member + part) % members for part in range(count))
            theirs = tuple((member + shift + part) % members for part in range(count))
            steps.append(Step((member - shift) % members, mine, (member + shift) % members, theirs))
        distance *= radix
    return steps


def direct(member: int, members: int) -> list[Step]:
    """Every member sends its part to each other one: `bruck` in a single round, m - 1 messages and one latency."""
    return bruck(member, members, radix=max(members, 2))


def logarithmic(member: int, members: int) -> list[Step]:
    """`doubling` where m is a power of two, else `bruck`."""
    return bruck(member, members) if members & (members - 1) else doubling(member, members)
