"""Kernels on this machine: sparse products beside dense ones (000, Figure 4.1), and matmuls as they are called and tuned (section 5.1.3)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from axonn_plugins.planner import machine
from axonn_recipes.papers.data import Value
from axonn_recipes.papers.experiments.grids import less
from axonn_recipes.papers.found import COUNTED, MEASURED, Experiment, Found
from axonn_recipes.planner.outcome import lines
from axonn_tp.layers.tuning import matmul_as, measure, product_of

BATCH, SPARSITY = 576, 0.9
WIDTHS = (128, 256, 512, 1024, 2048, 4096)
"""Rows and columns of the weight (Figure 4.1)."""
ROUNDS = 5


def _seconds(run: Callable[[], object]) -> float:
    """Median of a few turns after one that is not timed."""
    run()
    taken = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def sparse(folder: Path) -> Found:
    """A layer of 90 % sparsity by torch's CSR kernels and by dense ones, in float32 on this CPU."""
    torch.manual_seed(0)
    times: dict[str, list[float]] = {"dense": [], "CSR": []}
    for width in WIDTHS:
        weight = torch.randn(width, width) * (torch.rand(width, width) >= SPARSITY)
        rows, compressed = torch.randn(width, BATCH), weight.to_sparse_csr()
        times["dense"].append(_seconds(lambda: weight @ rows))  # noqa: B023
        times["CSR"].append(_seconds(lambda: compressed @ rows))  # noqa: B023
    slower = [slow / fast for slow, fast in zip(times["CSR"], times["dense"], strict=True)]
    values: dict[str, Value] = {
        "sparse over dense time on this CPU, least": min(slower),
        "sparse over dense time on this CPU, most": max(slower),
    }
    series = {name: (list(WIDTHS), found) for name, found in times.items()}
    return Found(values, {"times": lines("A layer of 90 % sparsity, 576 rows", "width", "s", series)})


def tuned(folder: Path) -> Found:
    """The products of a block's four layers, forward and backward, as torch calls them and in the fastest of the three modes."""
    torch.manual_seed(0)
    hidden, rows = 1024, 512
    called, fastest = 0.0, 0.0
    for k, n in ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)):
        inputs, weight, gradient = torch.randn(rows, k), torch.randn(n, k), torch.randn(rows, n)
        for a, b in ((inputs, weight.t()), (gradient, weight), (gradient.t(), inputs)):
            found = _modes(a, b)
            called, fastest = called + found[0], fastest + min(found)
    return Found({"tuning of matmuls on this CPU": less(fastest, called)})


def _modes(a: torch.Tensor, b: torch.Tensor) -> Sequence[float]:
    """Seconds in each mode, the one that torch takes first."""
    return measure([partial(matmul_as, a, b, mode) for mode in product_of(a, b).modes], a.device)


def peaks(folder: Path) -> Found:
    """Section 5.2.3: the peaks that the planner's machines have."""
    values: dict[str, Value] = {}
    for name in ("perlmutter", "frontier", "alps"):
        on = machine.load(name)
        values[f"{name.capitalize()}: advertised"] = on.tensor / 1e12
        values[f"{name.capitalize()}: empirical"] = (on.sustained or on.tensor) / 1e12
    return Found(values)


EXPERIMENTS = {
    "kernels_sparse": Experiment(sparse, MEASURED, 10),
    "kernels_tuned": Experiment(tuned, MEASURED, 8),
    "kernels_peaks": Experiment(peaks, COUNTED, 1),
}
