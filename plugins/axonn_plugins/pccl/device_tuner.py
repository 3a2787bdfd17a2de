"""Times NCCL and our algorithms on a group's accelerators, so that the faster has each size from then on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from axonn_plugins.pccl.algorithms import algorithms
from axonn_plugins.pccl.backend import forget, planner, using
from axonn_plugins.pccl.choice import NATIVE, WINDOW, Choice, Measured, Times
from axonn_plugins.pccl.executor import Executor

SIZES = (2**14, 2**17, 2**20, 2**23, 2**26)
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
_REPEATS = 5


def candidates(collective: str, nodes: Sequence[Sequence[int]], window: bool = False) -> list[Choice]:
    """Choices that come into question on these nodes: NCCL, and those with fewer steps than its rings.

    Args:
        collective: its name.
        nodes: the group's ranks by node.
        window: whether NCCL has symmetric windows on all ranks.
    """
    found = [Choice(NATIVE), *([Choice(WINDOW)] if window else [])]
    if any(len(node) > 1 for node in nodes) and len(nodes) > 1:
        found += [
            Choice("hierarchical_log_direct"),
            Choice("hierarchical_direct_direct"),
            Choice("hierarchical_ring_direct"),
        ]
    found += [Choice("recursive"), Choice("bruck"), Choice("tiny"), Choice("hierarchical_doubling_direct")]
    known = algorithms(collective, sum(map(len, nodes)))
    several = len(nodes) > 1
    return [
        choice
        for choice in found
        if choice.algorithm in (NATIVE, WINDOW)
        or choice.algorithm in known
        and (several or "hierarchical" not in choice.algorithm)
    ]


def tune(group: dist.ProcessGroup | None = None, sizes: Sequence[int] = SIZES, device: str = "cuda") -> Measured:
    """Measure on a group with the backend "pccl", for as long as it lives; every member calls it.

    Args:
        group: by default all ranks.
        sizes: bytes of all blocks.
        device: the tensors' device.

    Returns:
        The medians of the slowest rank's times, which the group, and groups with as many ranks on each node, go by from now on.
    """
    executor = planner(group, device)
    window = _everywhere(executor.window is not None, group, device)
    executor.measured.times = {
        collective: {size: _times(collective, size, group, device, executor, window) for size in sizes}
        for collective in COLLECTIVES
    }
    forget(group, device)
    return executor.measured


def _everywhere(here: bool, group: dist.ProcessGroup | None, device: str) -> bool:
    told = torch.tensor(int(here), device=device)
    with using(Choice(NATIVE), group, device):
        dist.all_reduce(told, dist.ReduceOp.MIN, group)
    return bool(told)


def _times(
    collective: str, size: int, group: dist.ProcessGroup | None, device: str, executor: Executor, window: bool
) -> Times:
    call = _operation(collective, size, group, device)
    found: Times = {}
    for choice in candidates(collective, executor.nodes, window):
        with using(choice, group, device):
            call()  # connects, and makes the plan
            seconds = torch.tensor([_timed(call, device) for _ in range(_REPEATS)], dtype=torch.float64, device=device)
        with using(Choice(NATIVE), group, device):
            dist.all_reduce(seconds, dist.ReduceOp.MAX, group)
        found[choice] = float(seconds.median())
    return found


def _timed(call: Callable[[], object], device: str) -> float:
    began = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _operation(collective: str, size: int, group: dist.ProcessGroup | None, device: str) -> Callable[[], object]:
    ranks = dist.get_world_size(group)
    own = torch.zeros(max(1, size // 4 // ranks), device=device)
    whole = torch.zeros(own.numel() * ranks, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, own, group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(own, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
    }
    return calls[collective]
