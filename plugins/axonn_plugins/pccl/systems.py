"""Times of libraries on a cluster, simulated as they are asked for, and how far speedups are off the published ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from axonn_plugins.pccl.algorithms import algorithms
from axonn_plugins.pccl.clusters import MB, Cluster
from axonn_plugins.pccl.published import Published
from axonn_plugins.pccl.rings import ring_seconds
from axonn_plugins.pccl.simulate import Machine, Timer, timer
from axonn_plugins.pccl.sweep import COLLECTIVES, OURS, PUBLISHED, Key, cells

_PIECES = 16
"""Pieces of a block at most: with as many under way, bandwidth binds."""


class Systems(ABC):
    """The vendor's library, Cray MPICH, PCCL and ours on a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._timers: dict[tuple[str, str, int, int], Timer] = {}
        self._known: dict[tuple[str, str, int, int, Machine, int], float] = {}

    @abstractmethod
    def library(self, collective: str, processes: int, megabytes: int) -> float:
        """Seconds of the vendor's library."""

    @abstractmethod
    def mpich(self, collective: str, processes: int, megabytes: int) -> float:
        """Seconds of Cray MPICH."""

    @abstractmethod
    def transport(self) -> Machine:
        """The machine as PCCL's messages and ours use it."""

    def shuffle(self, megabytes: int) -> float:
        """Seconds in which PCCL brings blocks into order."""
        del megabytes
        return 0.0

    def seconds(self, system: str, collective: str, processes: int, megabytes: int) -> float:
        """Time of a collective by one of `Sweep.times`' systems."""
        cell = collective, processes, megabytes
        if system == self.cluster.library:
            return self.library(*cell)
        if system == "Cray MPICH":
            return self.mpich(*cell)
        if system == "PCCL":
            return self.scheduled(PUBLISHED, *cell) + self.shuffle(megabytes)
        return min(*(self.scheduled(one, *cell) for one in OURS), self.library(*cell))

    def scheduled(self, algorithm: tuple[str, int], collective: str, processes: int, megabytes: int) -> float:
        """Seconds of one of our algorithms (name, chunks) with PCCL's messages."""
        return self._simulated(self.transport(), *algorithm, collective, processes, megabytes * MB)

    def times(self, processes: Sequence[int], sizes: Sequence[int]) -> dict[Key, float]:
        """Seconds for all systems, collectives, numbers of processes and MB."""
        return {
            (system, collective, count, size): self.seconds(system, collective, count, size)
            for system in (self.cluster.library, "Cray MPICH", "PCCL", "ours")
            for collective in COLLECTIVES
            for count in processes
            for size in sizes
        }

    def range(self, point: Published) -> tuple[float, float]:
        """The least and the greatest speedup over the cells that a published number speaks of."""
        found = [self.seconds(point.over, *cell) / self.seconds(point.system, *cell) for cell in cells(point)]
        return min(found), max(found)

    def _ring(self, machine: Machine, piece: int | None, collective: str, processes: int, megabytes: int) -> float:
        """A ring's time; it passes on blocks in pieces of so many bytes, or whole."""
        block, nodes = -(-megabytes * MB // processes), processes // self.cluster.ranks
        pieces = 1 if piece is None else min(-(-block // piece), _PIECES)
        known = "ring", collective, processes, pieces, machine, megabytes
        if known not in self._known:
            reduces = collective == "reduce_scatter"
            self._known[known] = ring_seconds(machine, nodes, self.cluster.ranks, block, pieces, reduces)
        return self._known[known]

    def _simulated(
        self, machine: Machine, name: str, chunks: int, collective: str, processes: int, total: int
    ) -> float:
        key = name, collective, processes, chunks
        known = *key, machine, total
        if known not in self._known:
            if key not in self._timers:
                nodes = processes // self.cluster.ranks
                make = algorithms(collective, processes)[name]
                self._timers[key] = timer(make, collective, nodes, self.cluster.ranks, chunks)
            self._known[known] = self._timers[key](machine, total)
        return self._known[known]


class Specified(Systems):
    """From tables alone: bandwidths and latencies, nothing fitted."""

    def library(self, collective: str, processes: int, megabytes: int) -> float:
        """One ring over all interfaces."""
        return self._ring(self.cluster.of(self.cluster.library, 0.0), None, collective, processes, megabytes)

    def mpich(self, collective: str, processes: int, megabytes: int) -> float:
        """One ring over one interface, whose sums are the CPU's."""
        return self._ring(self.cluster.of("Cray MPICH", 0.0), None, collective, processes, megabytes)

    def transport(self) -> Machine:
        """As it is."""
        return self.cluster.machine
