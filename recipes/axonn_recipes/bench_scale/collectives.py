"""The work of one of many ranks for PCCL: the meeting of a group, schedules, the tuner."""

from __future__ import annotations

import hashlib
import time

from axonn_plugins.pccl import rendezvous
from axonn_plugins.pccl.algorithms import algorithms
from axonn_plugins.pccl.backend import for_engine, receivers
from axonn_plugins.pccl.choice import Choice, choose
from axonn_plugins.pccl.contest import COLLECTIVES, contest
from axonn_plugins.pccl.links import Member
from axonn_plugins.pccl.program import Program
from axonn_plugins.pccl.vendor import nodes_of
from axonn_recipes.bench_scale.standin import CountingStore

NODE = 8
"""Ranks of a node."""
SIZES = (2**13, 2**20, 2**24, 2**28)
"""Bytes of all blocks, of which a schedule is made each."""
LATENCY, BANDWIDTH = 20e-6, 25e9
"""The network that the tuner is told of, in seconds and bytes a second."""


def member(rank: int) -> Member:
    """Where a rank would listen."""
    node, identity = rank // NODE, hashlib.md5(str(rank).encode()).hexdigest()
    place = (f"10.{node >> 8 & 255}.{node & 255}.1", 30000 + rank % 20000)
    return Member(identity, f"node{node:05d} {node:032x} net:[4026531840]", (place,), f"pccl-{identity}")


class Meeting:
    """The meeting of a group of which all but one rank have already told where they are.

    Args:
        ranks: of the group.
        rank: the one that is measured.
    """

    def __init__(self, ranks: int, rank: int) -> None:
        self.ranks, self.rank, self.store = ranks, rank, CountingStore()
        for other in range(ranks):
            if other != rank or rank:
                rendezvous.tell(self.store, other, member(other), member(other).node, "algorithm 'auto'")
        if rank:
            rendezvous.roll_of(self.store, 0, range(ranks))
            rendezvous.secret_of(self.store, 0, range(ranks))
        self.store.forget_counts()

    def __call__(self) -> object:
        """Tell, read, and find out who shares this rank's node."""
        rendezvous.secret_of(self.store, self.rank, range(self.ranks))
        rendezvous.tell(self.store, self.rank, member(self.rank), member(self.rank).node, "algorithm 'auto'")
        roll = rendezvous.roll_of(self.store, self.rank, range(self.ranks))
        rendezvous.reachable(roll, range(self.ranks))
        return roll, nodes_of(roll.nodes, range(self.ranks), "auto")


def nodes(ranks: int) -> list[range]:
    """The ranks by node."""
    return [range(first, first + NODE) for first in range(0, ranks, NODE)]


def program(collective: str, choice: Choice, ranks: int, rank: int) -> Program:
    """A rank's schedule."""
    make = algorithms(collective, ranks)[choice.algorithm]
    made: Program = make(collective, rank, ranks, nodes(ranks), choice.chunks)
    return made


def chosen(ranks: int) -> list[tuple[str, Choice]]:
    """The schedules that rules of thumb choose for calls of `SIZES`."""
    return sorted({(name, choose(name, size, nodes(ranks))) for name in COLLECTIVES for size in SIZES}, key=str)


def schedule(collective: str, choice: Choice, ranks: int, rank: int) -> object:
    """A rank's schedule in the engine's form."""
    return for_engine(program(collective, choice, ranks, rank), 0)


def links(ranks: int, rank: int) -> int:
    """To how many ranks the schedules of small calls send."""
    small = [(name, choose(name, SIZES[0], nodes(ranks))) for name in COLLECTIVES]
    return len({peer for name, choice in small for peer in receivers(program(name, choice, ranks, rank))})


def tuner(ranks: int, rank: int) -> object:
    """The tuner on a network that takes `LATENCY` a step and `BANDWIDTH`: trials, and a schedule for each choice.

    As in a job, the time for schedules is taken from its budget.
    """
    began = time.process_time()
    made: dict[tuple[str, Choice], Program] = {}
    trials, called = contest(nodes(ranks)), 0.0
    trial = next(trials)
    while True:
        key = trial.collective, trial.choice
        if key not in made:
            made[key] = program(*key, ranks, rank)
        seconds = LATENCY * len(made[key].ops) + trial.size / BANDWIDTH
        called += seconds * trial.calls
        try:
            trial = trials.send((seconds, called + time.process_time() - began))
        except StopIteration as end:
            return end.value
