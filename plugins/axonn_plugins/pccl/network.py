"""Latency and rate of the network between nodes, by a few messages: they tell clusters with the same nodes apart."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

_TRIES, _SPENT = 20, 0.015  # messages of a kind, or seconds
_LOAD = 2**18  # bytes
_ALIKE = 2.0  # times
_FINEST = 1e-4, 2**30  # seconds, bytes a second


@dataclass(frozen=True)
class Network:
    """Between the first two nodes of a group, with the least seconds of a few tries.

    Attributes:
        latency: seconds from node to node, half of a round trip.
        rate: bytes a second of a message of 256 KiB.
    """

    latency: float
    rate: float

    def alike(self, other: Network) -> bool:
        """True if neither number differs by more than a factor of 2; beyond `_FINEST`, they tell more of the processor."""
        latency, rate = _FINEST
        ratios = (
            max(self.latency, latency) / max(other.latency, latency),
            min(self.rate, rate) / min(other.rate, rate),
        )
        return all(1 / _ALIKE <= ratio <= _ALIKE for ratio in ratios)


def probe(inner: Any, rank: int, peer: int) -> Network | None:
    """Measure between ranks 0 and `peer` of a backend, which both call; the other's answer is None.

    It takes some 40 ms, more only where one message takes so long.
    """
    small, large = torch.zeros(1, dtype=torch.uint8), torch.zeros(_LOAD, dtype=torch.uint8)
    if rank != 0:
        for message in (small, large):
            while not message[0]:
                inner.recv([message], 0, 0).wait()
                inner.send([small], 0, 0).wait()
        return None
    there_and_back, loaded = (_least(inner, message, peer) for message in (small, large))
    return Network(there_and_back / 2, _LOAD / max(loaded - there_and_back, 1e-6))


def _least(inner: Any, message: torch.Tensor, peer: int) -> float:
    """Seconds of the fastest of a few messages and their answers; the last begins with a 1."""
    answer = torch.zeros(1, dtype=torch.uint8)
    seconds: list[float] = []
    while not message[0]:
        message[0] = len(seconds) == _TRIES - 1 or sum(seconds) > _SPENT
        began = time.perf_counter()
        sent = inner.send([message], peer, 0)  # is done only when it is known to have come
        inner.recv([answer], peer, 0).wait()
        sent.wait()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
