"""The speed of the devices, beside which the other figures are to be read."""

from __future__ import annotations

import torch
import torch.distributed as dist

from axonn_recipes.bench_network.measure import Clock, copies
from axonn_recipes.gpu_test.scale import Figure, Found, Scale


def run(scale: Scale) -> Found:
    """A square product, a copy, and a sum over all ranks."""
    clock, dtype = Clock(scale.place, max(scale.rounds, 3)), getattr(torch, scale.dtype)
    a = torch.randn(scale.edge, scale.edge, device=scale.place).to(dtype)
    out = torch.empty_like(a)
    rate = 2 * scale.edge**3 / clock.seconds(lambda: torch.mm(a, a, out=out), 10)
    found = Found(figures=[Figure(f"{scale.dtype} product of {scale.edge}^2", rate / 1e12, "TFLOP/s")])
    found.figures.append(Figure("copy, read and written", copies(clock, scale.place, scale.copied) / 1e9, "GB/s"))
    if scale.ranks > 1:
        size = scale.sizes[-1]
        data = torch.zeros(size // 4, device=scale.place)
        bus = 2 * (scale.ranks - 1) / scale.ranks * size / clock.seconds(lambda: dist.all_reduce(data), 5)
        found.figures.append(Figure(f"all-reduce of {size:,} bytes, bus bandwidth", bus / 1e9, "GB/s"))
    return found
