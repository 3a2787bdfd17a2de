"""Simulated times of PCCL and the libraries it was measured against, and the tables made of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from axonn_plugins.pccl.algorithms import algorithms
from axonn_plugins.pccl.clusters import MB, PROCESSES, SIZES, Cluster
from axonn_plugins.pccl.published import Published
from axonn_plugins.pccl.simulate import Machine, Timer, timer

COLLECTIVES = ("all_gather", "reduce_scatter")
PUBLISHED = ("hierarchical_log_ring", 1)
"""The dissertation's algorithm: recursive doubling or halving between nodes, a ring within, one phase after the other."""
OURS = (("hierarchical_log_direct", 1), ("hierarchical_log_direct", 4), ("hierarchical_radix4_direct", 1))
"""The algorithms that we choose from, besides the library itself."""

Key = tuple[str, str, int, int]
"""(system, collective, processes, MB)."""


@dataclass
class Sweep:
    """All simulated times of a cluster.

    Attributes:
        step: seconds that a message of the library's ring takes beyond the specified latency, and likewise MPICH's.
        times: seconds; the systems are "PCCL" as published, "ours", the library and "Cray MPICH".
    """

    cluster: Cluster
    step: float
    times: dict[Key, float] = field(default_factory=dict)

    def speedup(self, system: str, against: str, collective: str, processes: int, size: int) -> float:
        """Time of `against` over that of `system`: above 1, `system` is faster."""
        return self.times[against, collective, processes, size] / self.times[system, collective, processes, size]

    def range(self, system: str, point: Published) -> tuple[float, float]:
        """The least and the greatest speedup over the cells that a published number speaks of."""
        found = [self.speedup(system, point.over, *cell) for cell in cells(point)]
        return min(found), max(found)


def cells(point: Published) -> list[tuple[str, int, int]]:
    """(collective, processes, MB) that a published number speaks of."""
    return [
        (collective, processes, size)
        for collective in point.collectives
        for processes in PROCESSES
        for size in SIZES
        if point.processes[0] <= processes <= point.processes[1] and point.megabytes[0] <= size <= point.megabytes[1]
    ]


class Timers:
    """The programs of a cluster and their times, each made once."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._made: dict[tuple[str, int, str, int], Timer] = {}
        self._known: dict[tuple[tuple[str, int, str, int], Machine, int], float] = {}

    def seconds(
        self, algorithm: tuple[str, int], system: str, step: float, collective: str, cell: tuple[int, int]
    ) -> float:
        """Time of (name, chunks) on the cluster as `system` uses it; `cell` is (processes, MB)."""
        key = (*algorithm, collective, cell[0])
        if key not in self._made:
            make = algorithms(collective, cell[0])[algorithm[0]]
            self._made[key] = timer(make, collective, cell[0] // self.cluster.ranks, self.cluster.ranks, algorithm[1])
        known = key, self.cluster.of(system, step), cell[1]
        if known not in self._known:
            self._known[known] = self._made[key](known[1], cell[1] * MB)
        return self._known[known]


def fitted_step(timers: Timers) -> float:
    """The extra latency of the library's ring that gives the one published speedup the cluster is fitted to."""
    size, speedup = timers.cluster.fit
    cell = (PROCESSES[-1], size)
    goal = speedup * timers.seconds(PUBLISHED, "PCCL", 0.0, "all_gather", cell)
    low, high = 0.0, 1e-3
    for _ in range(20):
        middle = (low + high) / 2
        if timers.seconds(("ring", 1), timers.cluster.library, middle, "all_gather", cell) < goal:
            low = middle
        else:
            high = middle
    return high


def sweep(timers: Timers, step: float, processes: Iterable[int] = PROCESSES, sizes: Iterable[int] = SIZES) -> Sweep:
    """Simulate every system, collective, number of processes and size."""
    library = timers.cluster.library
    found = Sweep(timers.cluster, step)
    cells = [(count, size) for count in processes for size in sizes]
    for collective in COLLECTIVES:
        for cell in cells:
            count, size = cell
            theirs = timers.seconds(("ring", 1), library, step, collective, cell)
            ours = [timers.seconds(each, "PCCL", 0.0, collective, cell) for each in OURS]
            found.times[library, collective, count, size] = theirs
            found.times["Cray MPICH", collective, count, size] = timers.seconds(
                ("ring", 1), "MPI", step, collective, cell
            )
            found.times["PCCL", collective, count, size] = timers.seconds(PUBLISHED, "PCCL", 0.0, collective, cell)
            found.times["ours", collective, count, size] = min(theirs, *ours)
    return found


def comparison(specified: Sweep, fitted: Sweep) -> str:
    """The published speedups beside the simulated ones."""
    cluster = specified.cluster
    lines = [
        f"{cluster.name}: speedups, published and simulated",
        f"{'collective':<16}{'over':<12}{'processes':<12}{'MB':<10}{'published':<12}"
        f"{'specified':<14}{'fitted':<14}{'ours, fitted':<14}",
    ]
    for point in cluster.published:
        if point.system != "PCCL":
            continue
        lines.append(
            f"{collectives(point):<16}{point.over:<12}{span(*point.processes):<12}{span(*point.megabytes):<10}"
            f"{numbers(point):<12}{span(*specified.range('PCCL', point)):<14}{span(*fitted.range('PCCL', point)):<14}"
            f"{span(*fitted.range('ours', point)):<14}"
        )
    return "\n".join(lines)


def heat_table(found: Sweep, collective: str, system: str) -> str:
    """Speedup over the vendor's library: rows are sizes, the largest first, columns are processes."""
    library = found.cluster.library
    lines = [
        f"{found.cluster.name}, {collective}: {system} over {library}",
        f"{'MB':>6}" + "".join(f"{count:>8}" for count in PROCESSES),
    ]
    for size in reversed(SIZES):
        row = (found.speedup(system, library, collective, count, size) for count in PROCESSES)
        lines.append(f"{size:>6}" + "".join(f"{value:>8.2f}" for value in row))
    return "\n".join(lines)


def collectives(point: Published) -> str:
    """The collective that a number is of, or "both"."""
    return point.collectives[0] if len(point.collectives) == 1 else "both"


def numbers(point: Published) -> str:
    """The published number, or its range, as text."""
    return f"> {point.low:g}" if point.more_than else span(point.low, point.high)


def span(low: float, high: float) -> str:
    """A range, in two digits."""
    first, last = (f"{value:.0f}" if value >= 15 else f"{value:.2g}" for value in (low, high))
    return first if first == last else f"{first} - {last}"
