"""The simulator with what the tables leave out: protocols, congestion, MPI's rendezvous, and steps that a CPU drives.

A vendor's library passes on a ring's blocks in pieces, by the protocol that is fastest for them: LL, of little latency and
a fraction of the bandwidth, or Simple. Cray MPICH, with eager messages disabled (section 6.1.1), announces each message and
waits for the answer: three latencies. Latencies within and between nodes are those of the libraries' own tables.
What is left are five constants (`calibration.toml`), found on the numbers of some figures and tried on those of the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files as resources
from pathlib import Path
from statistics import geometric_mean

from axonn_plugins.pccl.clusters import DDR4, MB, PROCESSES, Cluster
from axonn_plugins.pccl.published import Published
from axonn_plugins.pccl.simulate import Machine
from axonn_plugins.pccl.systems import Systems
from axonn_plugins.planner import files

RENDEZVOUS = 3
"""Latencies of a message that is announced first."""
_TRUST = 0.01


@dataclass(frozen=True)
class Constant:
    """A constant that is fitted, and its meaning.

    Attributes:
        value: in seconds, bytes and bytes a second.
        start: where the search begins, which is about what tables have.
        meaning: what it is.
        phenomenon: what it stands for.
        plausible: what else is known of its size.
    """

    value: float
    start: float
    meaning: str
    phenomenon: str
    plausible: str


@dataclass(frozen=True)
class Calibration:
    """`calibration.toml`.

    Attributes:
        fitted_on: the figures whose numbers the constants were fitted to; the others' are held out.
        date: of the fit.
        source: of protocols and pieces.
        piece: bytes of a block that a library passes on at once.
        spread: power of the number of nodes that congestion grows with; assumed.
        errors: by half, "fitted" and "held out", the mean factor by which the simulated speedups are off, as it was when fitted.
        bounds: which that must not exceed.
        numbers: by half, the geometric mean of the published numbers, by which one that has changed is noticed.
        constants: congestion, bounce, step and near_message; one cluster's own has its name behind it.
        protocols: by library and name, (latency within a node, between nodes, share of the bandwidth).
    """

    fitted_on: tuple[str, ...]
    date: str
    source: str
    piece: int
    spread: float
    errors: Mapping[str, float]
    bounds: Mapping[str, float]
    numbers: Mapping[str, float]
    constants: Mapping[str, Constant]
    protocols: Mapping[str, Mapping[str, tuple[float, float, float]]]

    def value(self, name: str, cluster: Cluster, absent: float) -> float:
        """A constant on a cluster; `absent` where there is none for it."""
        found = self.constants.get(f"{name}_{cluster.name.lower()}") or self.constants.get(name)
        return absent if found is None else found.value

    def fits(self, point: Published) -> bool:
        """True if the constants were fitted to this number."""
        return any(point.place.endswith(figure) for figure in self.fitted_on)

    def with_values(self, values: Mapping[str, float]) -> Calibration:
        """Other values of the constants."""
        changed = {name: replace(constant, value=values[name]) for name, constant in self.constants.items()}
        return replace(self, constants=changed)


def load() -> Calibration:
    """The calibration that comes with this package."""
    path = Path(str(resources("axonn_plugins.pccl").joinpath("calibration.toml")))
    found = files.read("calibration", path)
    found["fitted_on"] = tuple(found["fitted_on"])
    return Calibration(**found | {"constants": {name: Constant(**one) for name, one in found["constants"].items()}})


class Calibrated(Systems):
    """With the constants of a calibration, which may be exchanged."""

    def __init__(self, cluster: Cluster, calibration: Calibration) -> None:
        super().__init__(cluster)
        self.calibration = calibration

    def library(self, collective: str, processes: int, megabytes: int) -> float:
        """A ring of pieces over all interfaces, by the fastest protocol."""
        machine, piece, congestion = self.cluster.machine, self.calibration.piece, self._congestion(processes)
        total = machine.nics * machine.nic_bandwidth
        best = math.inf
        for near, far, share in sorted(
            self.calibration.protocols[self.cluster.library].values(), key=lambda one: -one[2]
        ):
            if (1 - 1 / processes) * megabytes * MB / (share * total) < best:  # else bandwidth alone takes longer
                using = self._protocol(near, far, share, congestion)
                best = min(best, self._ring(using, piece, collective, processes, megabytes))
        return best

    def mpich(self, collective: str, processes: int, megabytes: int) -> float:
        """A ring over one interface, whose messages are announced, and whose sums are the CPU's."""
        machine = self.cluster.machine
        announced = replace(
            machine,
            nics=1,
            near_latency=RENDEZVOUS * machine.near_latency + self._value("near_message", 0.0),
            far_latency=RENDEZVOUS * machine.far_latency * self._congestion(processes),
            reduce_bandwidth=DDR4 / 3 / self.cluster.ranks,
        )
        return self._ring(announced, None, collective, processes, megabytes)

    def transport(self) -> Machine:
        """MPI between nodes, step by step; the library's Simple within."""
        near, _, _ = self.calibration.protocols[self.cluster.library]["Simple"]
        far = self.cluster.machine.far_latency + self._value("step", 0.0)
        return replace(self.cluster.machine, near_latency=near, far_latency=far)

    def _congestion(self, processes: int) -> float:
        """Factor by which a ring's message between nodes takes longer than its latency."""
        return max(1.0, self._value("congestion", 1.0) * (processes / PROCESSES[-1]) ** self.calibration.spread)

    def _protocol(self, near: float, far: float, share: float, congestion: float) -> Machine:
        machine = self.cluster.machine
        return replace(
            machine,
            nics=1,
            nic_bandwidth=machine.nic_bandwidth * machine.nics * share,
            near_bandwidth=machine.near_bandwidth * share,
            near_latency=near,
            far_latency=far * congestion,
            copy_bandwidth=self._value("bounce", math.inf) * share * self._value("congestion", 1.0) / congestion,
        )

    def shuffle(self, megabytes: int) -> float:
        """PCCL's third step reads and writes all once (section 6.2.1); a sum reads two numbers and writes one."""
        return 2 / 3 * megabytes * MB / self.cluster.machine.reduce_bandwidth

    def _value(self, name: str, absent: float) -> float:
        return self.calibration.value(name, self.cluster, absent)


def halves(simulated: Sequence[Calibrated]) -> dict[str, list[tuple[Published, float]]]:
    """Published numbers of each half, and the factors by which the simulated ones are off."""
    found: dict[str, list[tuple[Published, float]]] = {"fitted": [], "held out": []}
    for each in simulated:
        for point in each.cluster.published:
            half = "fitted" if each.calibration.fits(point) else "held out"
            found[half].append((point, point.off(*each.range(point))))
    return found


def fit(calibration: Calibration, clusters: Sequence[Cluster]) -> Calibration:
    """The constants for which the simulated speedups are least off the numbers that are to be fitted.

    Each constant in turn is made larger and smaller as long as that helps, by steps that shrink from 2 to 1.05 times; values
    have two digits. A constant that is e times further from where it starts must make the mean factor better by `_TRUST`, so that
    what the numbers do not tell stays near what tables have.
    """
    simulated = [Calibrated(cluster, calibration) for cluster in clusters]
    start = {name: constant.start for name, constant in calibration.constants.items()}

    def loss(tried: Mapping[str, float]) -> float:
        for each in simulated:
            each.calibration = calibration.with_values(tried)
        far = sum(abs(math.log(tried[name] / start[name])) for name in start)
        off = geometric_mean(factor for _, factor in halves(simulated)["fitted"])
        return math.log(off) + _TRUST * far

    values, best = start, loss(start)
    for step in (2.0, 1.4, 1.2, 1.1, 1.05):
        better = True
        while better:
            better = False
            for name in values:
                for factor in (step, 1 / step):
                    tried = values | {name: float(f"{values[name] * factor:.1e}")}
                    if (found := loss(tried)) < best - 1e-6:
                        values, best, better = tried, found, True
                        break
    return calibration.with_values(values)
