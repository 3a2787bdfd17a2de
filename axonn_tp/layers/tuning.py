"""Which way to call BLAS: every distinct matmul of the first step is timed as NN, NT and TN (dissertation §5.1.3).

The letters say how the left and the right operand lie in memory: N as written, row by row, or T, column by column.
A mode that an operand does not have costs a copy, which is timed with it. The products of one rank are partial sums,
and no other rank computes the same one, so ranks may differ in their choice without a replica ending up with other
bits; `Tuner.finish` lets all follow rank 0 nevertheless, so that a cache gives the next run the same bits again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_tp.layers.product import Matmul
from axonn_tp.layers.tuning_cache import Machine, read_times, write_times

MODES = ("NN", "NT", "TN")
# A gain below this is noise.
WORTH = 1.03


class Product(NamedTuple):
    """One distinct matmul: (m × k) · (k × n) of a dtype, its operands lying as `given` says."""

    m: int
    k: int
    n: int
    dtype: str
    given: str

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes worth timing, the given one first."""
        return (self.given, *(mode for mode in MODES if mode != self.given))


def _lies(operand: Tensor) -> str:
    return "T" if operand.stride(1) != 1 and operand.stride(0) == 1 else "N"


def product_of(a: Tensor, b: Tensor) -> Product:
    """The distinct matmul that `a @ b` is."""
    return Product(a.shape[0], a.shape[1], b.shape[1], str(a.dtype).removeprefix("torch."), _lies(a) + _lies(b))


def _lay(operand: Tensor, how: str) -> Tensor:
    if _lies(operand) == how:
        return operand
    return operand.contiguous() if how == "N" else operand.t().contiguous().t()


def matmul_as(a: Tensor, b: Tensor, mode: str) -> Tensor:
    """`a @ b` with the operands laid in memory as `mode` says, copied where they are not."""
    return _lay(a, mode[0]) @ _lay(b, mode[1])


def measure(runs: list[Callable[[], Tensor]], device: torch.device, budget: float = 0.1) -> list[float]:
    """Seconds that each of `runs` takes, by turns, the median; about `budget` seconds for all together.

    One that does not fit into the memory takes for ever.
    """
    taken: list[list[float]] = [[] for _ in runs]
    for run, times in zip(runs, taken, strict=True):
        try:
            _timed(run, device)
            times.append(_timed(run, device))
        except torch.OutOfMemoryError:
            times.append(float("inf"))
    fitting = [(run, times) for run, times in zip(runs, taken, strict=True) if times[0] != float("inf")]
    rounds = min(max(int(budget / max(sum(times[0] for _, times in fitting), 1e-9)), 3), 50)
    for _ in range(rounds):
        for run, times in fitting:
            times.append(_timed(run, device))
    return [statistics.median(times) for times in taken]


def _timed(run: Callable[[], Tensor], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    run()
    events[1].record()
    events[1].synchronize()
    return events[0].elapsed_time(events[1]) / 1e3


class Tuner:
    """Multiplies matrices the way that was fastest when their shapes were first seen.

    Args:
        device: where the matrices are.
        cache: folder for what was measured, by device and library version; nothing is kept when None.
        timer: measures alternatives, see `measure`.
        group: the ranks that multiply alike: all, or those of a pipeline's stage.

    Attributes:
        times: seconds by mode, by product.
        stepped: whether a backward pass has been seen, so that the first step ends when the next forward begins.
        finished: whether the first step is over; products not seen by then run as given.
    """

    def __init__(
        self,
        device: torch.device,
        cache: Path | None = None,
        timer: Callable[[list[Callable[[], Tensor]], torch.device], list[float]] = measure,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.device, self._cache, self._timer, self._group = device, cache, timer, group
        self._machine = Machine.of(device)
        self._known = {} if cache is None else read_times(cache, self._machine)
        self.times: dict[Product, dict[str, float]] = {}
        self.stepped = self.finished = False

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """`a @ b` of two matrices, either of which may be a transposed view."""
        product = product_of(a, b)
        if product not in self.times:
            if self.finished or not a.numel() or not b.numel():
                return a @ b
            self.times[product] = self._known.get(_name(product)) or self._time(product, a, b)
        return matmul_as(a, b, self.choice(product))

    @torch.no_grad()
    def _time(self, product: Product, a: Tensor, b: Tensor) -> dict[str, float]:
        a, b = a.detach(), b.detach()
        runs: list[Callable[[], Tensor]] = [partial(matmul_as, a, b, mode) for mode in product.modes]
        return dict(zip(product.modes, self._timer(runs, self.device), strict=True))

    def choice(self, product: Product) -> str:
        """The mode in which a product runs: the fastest, or as given where that gains next to nothing."""
        times = self.times.get(product, {})
        best = min(times, key=lambda mode: times[mode], default=product.given)
        return best if times and times[product.given] > WORTH * times[best] else product.given

    def gain(self, product: Product) -> float:
        """The time of a product as it is given over that of the way chosen: above 1, the choice is faster."""
        times = self.times[product]
        return times[product.given] / times[self.choice(product)]

    def finish(self) -> None:
        """The first step is over: all ranks take the first one's measurements, which prints them and keeps them on disk.

        Every rank calls it, at the same place.
        """
        if dist.is_initialized() and dist.get_world_size(self._group) > 1:
            shared = [self.times]
            dist.broadcast_object_list(shared, group=self._group, group_src=0, device=self.device)
            self.times.update(shared[0])
        self.finished = True
        if not dist.is_initialized() or dist.get_rank(self._group) == 0:
            print(self.table(), flush=True)
            if self._cache is not None:
                write_times(
                    self._cache, self._machine, {_name(product): times for product, times in self.times.items()}
                )

    def table(self) -> str:
        """Times in milliseconds and the way that runs, a row for each product; the largest gain first."""
        rows: list[tuple[str, ...]] = [("m", "k", "n", "dtype", "given", *MODES, "runs", "gain")]
        for product in sorted(self.times, key=self.gain, reverse=True):
            times = self.times[product]
            cells = [f"{times[mode] * 1e3:.3f}" if mode in times else "-" for mode in MODES]
            rows.append((*map(str, product), *cells, self.choice(product), f"{self.gain(product):.2f}x"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([f"matmuls on {self._machine.device}, ms", *lines])


class TunedMatmul(Matmul):
    """The three products of a linear, each through a tuner.

    Args:
        tuner: shared by all layers of a model.
    """

    def __init__(self, tuner: Tuner) -> None:
        self.tuner = tuner

    def __deepcopy__(self, memo: dict) -> TunedMatmul:
        """A copied model goes on with what was measured."""
        return self

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """O = I·Wᵀ, an NT product."""
        output = self.tuner.matmul(input.reshape(-1, input.shape[-1]), weight.t())
        output = output.view(*input.shape[:-1], weight.shape[0])
        return output if bias is None else output + bias

    def grad_input(self, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        """The input's gradient dO·W, an NN product."""
        return self.tuner.matmul(grad.reshape(-1, grad.shape[-1]), weight).view(shape)

    def grad_weight(self, grad: Tensor, input: Tensor, shape: torch.Size) -> Tensor:
        """The weight's gradient dOᵀ·I, a TN product."""
        self.tuner.stepped = True
        return self.tuner.matmul(grad.reshape(-1, grad.shape[-1]).t(), input.reshape(-1, input.shape[-1]))


def _name(product: Product) -> str:
    return f"{product.m}x{product.k}x{product.n} {product.dtype} {product.given}"
