"""Rates of matrix products, and what describes them all: the rate of endless ones, and the flop at which half of it is reached."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from axonn_plugins.observe.progress import each
from axonn_recipes.bench_network.measure import Clock, begin, copies

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Products:
    """Times of matrix products on a rank, while all ranks do the same.

    Attributes:
        device: what computes.
        dtype: of the elements.
        seconds: of (M × K) times (K × N), by (M, K, N).
        memory_bandwidth: of a copy, read and written.
    """

    device: str
    dtype: str
    seconds: dict[Shape, float]
    memory_bandwidth: float

    @property
    def fit(self) -> tuple[float, float]:
        """Flop/s of endless products, and the flop of one that reaches half of that, with least relative errors.

        A product of F flop takes (F + half) / rate, a line.
        """
        flops = np.array([2.0 * m * k * n for m, k, n in self.seconds])
        took = np.array(list(self.seconds.values()))
        terms = np.stack([flops / took, 1 / took], axis=1)
        scale = np.abs(terms).max(axis=0)  # the two are many orders of magnitude apart
        slope, start = np.linalg.lstsq(terms / scale, np.ones(len(took)), rcond=None)[0] / scale
        if start <= 0 or slope <= 0:  # small ones are as fast
            return float(1 / np.mean(took / flops)), 1.0
        return float(1 / slope), float(start / slope)

    @property
    def error(self) -> float:
        """Share by which the fit misses, on average."""
        rate, half = self.fit
        return float(
            np.mean([abs((2.0 * m * k * n + half) / rate / took - 1) for (m, k, n), took in self.seconds.items()])
        )


def shapes(largest: int) -> list[Shape]:
    """Squares of five sizes up to the largest, and with each of their three sides four times as long."""
    edges = [max(largest // 2**i, 1) for i in range(4, -1, -1)]
    return [side for e in edges for side in ((e, e, e), (4 * e, e, e), (e, 4 * e, e), (e, e, 4 * e))]


def measure(dtype: str, largest: int, size: int, rounds: int) -> Products:
    """Measure; every rank calls it, and has the result.

    Args:
        dtype: of torch; "auto" is bfloat16 on a GPU, float32 on a CPU.
        largest: edge of the largest square; 0 for 8192 on a GPU, 1024 on a CPU.
        size: bytes that are copied.
        rounds: how often each is timed; the median counts, of the slowest rank.
    """
    device = begin()
    clock, cuda = Clock(device, rounds), device.type == "cuda"
    name = {True: "bfloat16", False: "float32"}[cuda] if dtype == "auto" else dtype
    asked = shapes(largest or (8192 if cuda else 1024))
    found = Products(
        device=torch.cuda.get_device_name(device) if cuda else "CPU",
        dtype=name,
        seconds=_times(clock, asked, getattr(torch, name)),
        memory_bandwidth=copies(clock, device, size),
    )
    dist.destroy_process_group()
    return found


def _times(clock: Clock, asked: list[Shape], dtype: torch.dtype) -> dict[Shape, float]:
    found = {}
    for m, k, n in each(asked, "products", "shape"):
        a, b = torch.randn(m, k, device=clock.device).to(dtype), torch.randn(k, n, device=clock.device).to(dtype)
        out = torch.empty(m, n, device=clock.device, dtype=dtype)
        # As often in a row as takes what starting and a barrier take for nothing.
        times = int(min(max(2e8 // (m * k * n), 1), 100))
        found[m, k, n] = clock.seconds(partial(torch.mm, a, b, out=out), times)
    return found
