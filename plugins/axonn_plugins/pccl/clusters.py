"""Frontier and Perlmutter as the simulator sees them, and what the dissertation measured there.

Network: 4 interfaces a node of 25 GB/s each (dissertation, section 5.3), of which collectives reach 70 %; latencies of
5 us between nodes and 2.5 us within; NVLink 300 GB/s a GPU and HBM2 1555 GB/s (004, table A3 and its validation on
Perlmutter). Frontier: Infinity Fabric from 50 to 200 GB/s between GCDs, of which 100 is taken, HBM2E 1.6 TB/s
(Frontier User Guide). A sum reads two numbers and writes one, so runs at a third of the memory's bandwidth. A message
costs its sender 1 us, which is assumed, as is the node's 205 GB/s of DDR4 that Cray MPICH's sums share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from axonn_plugins.pccl.published import Published, published
from axonn_plugins.pccl.simulate import Machine

MB = 1_000_000
PROCESSES = (32, 64, 128, 256, 512, 1024, 2048)
SIZES = (16, 32, 64, 128, 256, 512, 1024)
EFFICIENCY = 0.7
DDR4 = 205e9


@dataclass(frozen=True)
class Cluster:
    """A machine, its vendor's library, and what was published of it.

    Attributes:
        fit: (MB, speedup over the library's all-gather on 2048 processes) that the library's latency is fitted to.
    """

    name: str
    library: str
    ranks: int
    machine: Machine
    fit: tuple[int, float]
    published: tuple[Published, ...]

    def of(self, system: str, step: float) -> Machine:
        """The machine as a system uses it, whose ring waits `step` seconds more for each message.

        The library's ring spreads each message over all interfaces; Cray MPICH sends all on one, and sums on the CPU
        (section 6.1).
        """
        if system == "PCCL":
            return self.machine
        latencies = {"far_latency": self.machine.far_latency + step, "near_latency": self.machine.near_latency + step}
        if system == self.library:
            return replace(
                self.machine, nics=1, nic_bandwidth=self.machine.nic_bandwidth * self.machine.nics, **latencies
            )
        return replace(self.machine, nics=1, reduce_bandwidth=DDR4 / 3 / self.ranks, **latencies)


FRONTIER = Cluster(
    "Frontier",
    "RCCL",
    8,
    Machine(4, EFFICIENCY * 25e9, 5e-6, EFFICIENCY * 100e9, 2.5e-6, 1e-6, 1.6e12 / 3),
    (64, 30.0),
    published("Frontier"),
)

PERLMUTTER = Cluster(
    "Perlmutter",
    "NCCL",
    4,
    Machine(4, EFFICIENCY * 25e9, 5e-6, EFFICIENCY * 300e9, 2.5e-6, 1e-6, 1.555e12 / 3),
    (32, 4.0),
    published("Perlmutter"),
)

CLUSTERS = {"frontier": FRONTIER, "perlmutter": PERLMUTTER}
