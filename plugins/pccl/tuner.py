"""Times the choices that come into question on a group, so that the fastest is taken from then on.

Every rank makes the same calls; times are those of the slowest rank, so all ranks decide alike. The native library is
always measured: where it is fastest, PCCL leaves the collective to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from plugins.pccl.algorithms import algorithms
from plugins.pccl.backend import forget, planner, using
from plugins.pccl.choice import NATIVE, Choice, Measured, Times
from plugins.pccl.tuning_file import key_of, read, tuning_file, write

SIZES = (2**13, 2**16, 2**19, 2**21, 2**23)
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
_HOPELESS = 1.5  # times the best so far: not measured again
_SMALL, _LARGE = 2**18, 2**20


def candidates(collective: str, size: int, nodes: Sequence[Sequence[int]]) -> list[Choice]:
    """What comes into question for `size` bytes on these nodes, the likeliest first."""
    ranks = sum(len(node) for node in nodes)
    chunked = (1,) if size <= _SMALL else (1, 2, 4)
    if len(nodes) == 1:
        found = [Choice("direct"), *(Choice("ring", chunks) for chunks in chunked)]
    elif all(len(node) == 1 for node in nodes):
        found = [Choice("bruck"), Choice("ring"), *(Choice("direct", chunks) for chunks in chunked)]
    else:
        found = [Choice("hierarchical_direct_direct", chunks) for chunks in chunked]
        found += [Choice("hierarchical_ring_direct", chunks) for chunks in chunked if size > _SMALL]
        found += [Choice("hierarchical_log_direct", chunks) for chunks in chunked if size < _LARGE]
        found += [Choice("led_radix4"), Choice("led_log")] if size <= _SMALL else []
        found += [Choice("ring"), Choice("direct")] if size > _SMALL else [Choice("direct")]
    if collective == "all_reduce" and size <= _SMALL:
        found += [Choice("tiny")] + ([Choice("led_doubling")] if len(nodes) > 1 else [])
    known = algorithms(collective, ranks)
    return [choice for choice in dict.fromkeys(found) if choice.algorithm in known] + [Choice(NATIVE)]


def tune(
    group: dist.ProcessGroup | None = None, file: Path | None = None, sizes: Sequence[int] = SIZES, again: bool = False
) -> Measured:
    """Measure on a group with the backend "pccl", or read what was measured before; every member calls it.

    Args:
        group: by default all ranks.
        file: where times are kept; by default `tuning_file`. Rank 0's counts.
        sizes: bytes of all blocks.
        again: measure even if there are times.

    Returns:
        The times, which the group goes by from now on. Groups made later with the same node map find them in the file.
    """
    asked = planner(group)
    file, key = Path(file or asked.options.tuning_file or tuning_file()), key_of(asked.nodes)
    first = dist.get_rank(group) == 0
    known = [Measured() if again or not first else read(file, key)]
    dist.broadcast_object_list(known, group=group, group_src=0)
    measured: Measured = known[0]
    if not measured.times:
        measured = measure(group, sizes)
        if first:
            write(file, key, measured)
    asked.measured = measured
    forget(group)
    return measured


def measure(group: dist.ProcessGroup | None, sizes: Sequence[int]) -> Measured:
    """Seconds of all candidates at all sizes."""
    nodes = planner(group).nodes
    return Measured(
        {
            collective: {size: _times(collective, size, candidates(collective, size, nodes), group) for size in sizes}
            for collective in COLLECTIVES
        }
    )


def _times(collective: str, size: int, choices: Sequence[Choice], group: dist.ProcessGroup | None) -> Times:
    """The least of up to four times of each choice, of two for large sizes; hopeless ones are timed once and left out."""
    call = operation(collective, size, dist.get_world_size(group), group)
    found: Times = {}
    for round_ in range(4 if size <= _SMALL else 2):
        for choice in choices:
            if round_ and choice not in found:
                continue
            if not round_:  # makes links, and touches memory
                _slowest(call, choice, group)
            seconds = _slowest(call, choice, group)
            found[choice] = min(seconds, found.get(choice, seconds))
        best = min(found.values())
        found = {choice: seconds for choice, seconds in found.items() if seconds <= _HOPELESS * best}
    return found


def _slowest(call: Callable[[], None], choice: Choice, group: dist.ProcessGroup | None) -> float:
    dist.barrier(group)
    with using(choice, group):
        began = time.perf_counter()
        call()
        seconds = time.perf_counter() - began
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return float(slowest)


def operation(collective: str, size: int, ranks: int, group: dist.ProcessGroup | None) -> Callable[[], None]:
    """A collective of about `size` bytes of float32."""
    each = max(1, size // 4 // ranks)
    whole, own = torch.ones(each * ranks), torch.ones(each)
    calls: dict[str, Callable[[Tensor, Tensor], object]] = {
        "all_gather": lambda whole, own: dist.all_gather_into_tensor(whole, own, group),
        "reduce_scatter": lambda whole, own: dist.reduce_scatter_tensor(own, whole, group=group),
        "all_reduce": lambda whole, own: dist.all_reduce(whole.fill_(1.0), group=group),
    }
    return lambda: (calls[collective](whole, own), None)[1]
