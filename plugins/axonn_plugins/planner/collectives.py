"""Seconds that a collective takes on two networks, a fast one within a domain and a slow one between domains (004, section III).

The ring's formulas: α_s(n/v − 1) + α_f(n − n/v) + (n − 1)/n · V/B, for a group of n GPUs of which v share a domain.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from axonn_plugins.planner.machine import Machine
from axonn_plugins.planner.work import Number


class Kind(Enum):
    """Collectives by their kind; all-gather and reduce-scatter take equally long, as do broadcast and reduce."""

    GATHER = "all-gather"
    SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    BROADCAST = "broadcast"
    REDUCE = "reduce"


@dataclass(frozen=True)
class Collective:
    """A collective of a group along one axis.

    Attributes:
        kind: what it does.
        axis: "n1" or "n2", the groups of tensor parallelism.
        volume: bytes of the full tensor.
    """

    kind: Kind
    axis: str
    volume: Number


def seconds(machine: Machine, kind: Kind, volume: Number, n: Number, v: Number) -> Number:
    """Time of a collective.

    An all-reduce is twice an all-gather only where its group is in several domains with several GPUs in each: so it is in the
    published results.

    Args:
        machine: the networks.
        kind: what it does.
        volume: bytes of the full tensor.
        n: GPUs of the group.
        v: of which so many share a domain.
    """
    mixed = (v > 1) & (v < n)
    share = (np.asarray(n) > 1) * 1.0 if kind in (Kind.BROADCAST, Kind.REDUCE) else (n - 1) / n
    twice = np.where(mixed, 2.0, 1.0) if kind is Kind.ALL_REDUCE else 1.0
    if machine.collectives == "pccl" and kind not in (Kind.BROADCAST, Kind.REDUCE):
        return twice * _hierarchical(machine, volume, n, v)
    if machine.calibration is not None and kind is Kind.ALL_REDUCE:
        twice = 2.0
    latency = machine.slow_latency * (n / v - 1) + machine.fast_latency * (n - n / v)
    return latency + twice * share * volume / bandwidth(machine, n, v)


def _hierarchical(machine: Machine, volume: Number, n: Number, v: Number) -> Number:
    """PCCL's gather: recursive doubling of shares between domains, then a ring within each (000, section 6.2)."""
    domains = n / v
    reached_fast, reached_slow = reached(machine, domains)
    slow = np.maximum(v * machine.interfaces, 1.0) * machine.slow_bandwidth * reached_slow
    fast = machine.fast_bandwidth * reached_fast
    latency = machine.slow_latency * np.ceil(np.log2(domains)) + machine.fast_latency * (v - 1)
    return latency + (domains - 1) / domains * volume / slow + (v - 1) / v * volume / fast


def bandwidth(machine: Machine, n: Number, v: Number) -> Number:
    """Bytes a second of a ring: every GPU of the group in a domain drives its network interfaces, up to the fast network's rate."""
    reached_fast, reached_slow = reached(machine, n / v)
    slow = machine.slow_bandwidth * reached_slow
    fast = machine.fast_bandwidth * reached_fast
    mixed = np.minimum(np.maximum(v * machine.interfaces, 1.0) * slow, fast)
    return np.where(v == 1, slow, np.where(v == n, fast, mixed))


def reached(machine: Machine, domains: Number) -> tuple[float, Number]:
    """Shares of the bandwidths within a domain and between domains that a collective of so many domains reaches."""
    if machine.calibration is None:
        return machine.bandwidth_efficiency, machine.bandwidth_efficiency
    of = machine.calibration
    return of.fast, of.slow / (1 + of.crowding * np.log2(np.maximum(domains, 1)))


def sum_of_shares(machine: Machine, ranks: Number, near: Number) -> Number:
    """Seconds of a sum of weights' gradients, of which each rank gets its share, beside those of an all-gather of the same bytes.

    Where a reduce-scatter is done as an all-reduce, as gloo does, ranks exchange their shares instead if fewer bytes go between nodes
    (`axonn_tp.comm.gloo_reduce_scatter`).

    Args:
        machine: the networks.
        ranks: of the group.
        near: of which so many share a domain.
    """
    exchanged = np.maximum(near * (ranks - near) / np.maximum(ranks - 1, 1), 1.0)
    return np.where(exchanged < 2, np.minimum(machine.reduce_scatter, exchanged), machine.reduce_scatter)


def point_to_point(machine: Machine, volume: Number, n: Number, v: Number, paper: bool) -> Number:
    """Mean time of a message from one pipeline stage to the next.

    Args:
        machine: the networks.
        volume: bytes.
        n: stages.
        v: stages that share a domain.
        paper: between domains, messages cost nothing where v > 1: so it is in the published results.
    """
    reached_fast, reached_slow = reached(machine, 1)
    slow = machine.slow_latency + volume / (machine.slow_bandwidth * reached_slow)
    fast = machine.fast_latency + volume / (machine.fast_bandwidth * reached_fast)
    within, between = n - n / v, n / v - 1
    charged = np.where((v > 1) & paper, 0.0, between)
    return (within * fast + charged * slow) / np.maximum(n - 1, 1)
