"""The measurements of each rank: arithmetic, memory, and rings within and between nodes (000, section 5.1.2, case 1)."""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from axonn_plugins.observe.progress import each
from axonn_tp import Grid, Mesh, parallelize

_LAYERS, _WIDTH, _ROWS = 16, 256, 128
"""Sizes of the small model whose sums are timed, one for each layer: of outputs in forward, or of gradients in backward."""


@dataclass(frozen=True)
class Measured:
    """A machine as measured, in bytes, seconds and flop; of a rank, while all ranks do the same.

    Attributes:
        device: what computes.
        nodes: of the run.
        ranks: of a node.
        bf16: whether it computes in bf16; of GPUs else fp16.
        tensor: flop/s of a large matrix multiplication, in these 16 bits on a GPU, in float32 on a CPU.
        vector: flop/s of element-wise products in cache.
        overhead: seconds of the smallest operation.
        memory: of a rank.
        memory_bandwidth: of a copy, read and written.
        within: by (G0, G1), bandwidth of G0 simultaneous rings of G1 ranks, every G0th of a node in one.
        within_latency: of a message within a node; None with one rank a node.
        between: bandwidth of one ring over all ranks; None with one node.
        between_latency: of a message there.
        reduce_scatter: seconds of one over all ranks beside an all-gather's of the same bytes; None with one rank.
        call: seconds that a layer's sum over two ranks takes longer in training than by itself; None on GPUs, where collectives run
            behind, and where no node has two ranks.
    """

    device: str
    nodes: int
    ranks: int
    bf16: bool
    tensor: float
    vector: float
    overhead: float
    memory: float
    memory_bandwidth: float
    within: dict[tuple[int, int], float]
    within_latency: float | None
    between: float | None
    between_latency: float | None
    reduce_scatter: float | None
    call: float | None


def measure(size: int, edge: int, rounds: int) -> Measured:
    """Measure; every rank calls it, and has the result.

    Args:
        size: bytes of what a ring gathers.
        edge: of the square matrices that are multiplied.
        rounds: how often each is timed; the median counts, of the slowest rank.
    """
    device = begin()
    clock, cuda = Clock(device, rounds), device.type == "cuda"
    world, ranks = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    nodes = world // ranks
    rings = Rings(clock, world, ranks, device)
    within = {pair: rings.bandwidth(*pair, size) for pair in each(pairs(ranks), "rings in a node", "ring")}
    found = Measured(
        device=torch.cuda.get_device_name(device) if cuda else "CPU",
        nodes=nodes,
        ranks=ranks,
        bf16=_bf16(device),
        **_arithmetic(clock, device, edge),
        memory=_memory(device, ranks),
        memory_bandwidth=copies(clock, device, size),
        within=within,
        within_latency=rings.latency(1, ranks) if ranks > 1 else None,
        between=rings.bandwidth(1, world, size) if nodes > 1 else None,
        between_latency=rings.latency(1, world) if nodes > 1 else None,
        reduce_scatter=rings.reduce_scatter(1, world, size) if world > 1 else None,
        call=_call(clock, rings, world) if not cuda and ranks % 2 == 0 else None,
    )
    dist.destroy_process_group()
    return found


def begin() -> torch.device:
    """This rank's device, and the process group over all ranks; on a CPU it computes on one core."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    cuda = torch.cuda.is_available()
    torch.set_num_threads(1)
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()) if cuda else torch.device("cpu")
    )
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    return device


def pairs(ranks: int) -> list[tuple[int, int]]:
    """Every (G0, G1) with G1 > 1 whose product divides a node's ranks."""
    return [(a, b) for a in range(1, ranks + 1) for b in range(2, ranks + 1) if ranks % (a * b) == 0]


class Clock:
    """Times a call on all ranks at once."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device, self.rounds = device, rounds

    def seconds(self, call: Callable[[], object], times: int = 1) -> float:
        """The median of several rounds, of the slowest rank; a round is a number of calls in a row, of which the mean counts.

        Ranks leave the barrier before a round at different times, by as much as messages between nodes take, so that what is as short as
        a message is to be called several times.
        """
        call()
        spent = []
        for _ in range(self.rounds):
            self._wait()
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(times):
                call()
            self._wait()
            spent.append((time.perf_counter() - begun) / times)
        slowest = torch.tensor([statistics.median(spent)], device=self.device, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Rings:
    """Simultaneous all-gathers within groups."""

    def __init__(self, clock: Clock, world: int, ranks: int, device: torch.device) -> None:
        self._clock, self._world, self._ranks, self._device = clock, world, ranks, device
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}

    def bandwidth(self, before: int, members: int, size: int) -> float:
        """Bytes a second of a ring: (n − 1)/n of what is gathered, by the time."""
        spent = self._gather(before, members, max(size // 4 // members, 1), times=min(max(2**24 // size, 1), 50))
        return (members - 1) * max(size // 4 // members, 1) * 4 / spent

    def latency(self, before: int, members: int) -> float:
        """Seconds of a message: a gather of one element each, by the messages that one waits for."""
        return self._gather(before, members, 1, times=50) / (members - 1)

    def reduce_scatter(self, before: int, members: int, size: int) -> float:
        """Seconds of a reduce-scatter beside those of an all-gather of as many bytes."""
        elements = max(size // 4 // members, 1)
        group = self._group(before, members)
        whole = torch.ones(elements * members, device=self._device)
        own = torch.empty(elements, device=self._device)
        spent = self._clock.seconds(lambda: dist.reduce_scatter_tensor(own, whole, group=group))
        return spent / self._gather(before, members, elements)

    def all_reduce(self, before: int, members: int, elements: int) -> float:
        """Seconds of a sum."""
        group, whole = self._group(before, members), torch.ones(elements, device=self._device)
        return self._clock.seconds(lambda: dist.all_reduce(whole, group=group), times=10)

    def _gather(self, before: int, members: int, elements: int, times: int = 1) -> float:
        group = self._group(before, members)
        own = torch.ones(elements, device=self._device)
        whole = torch.empty(elements * members, device=self._device)
        return self._clock.seconds(lambda: dist.all_gather_into_tensor(whole, own, group), times)

    def _group(self, before: int, members: int) -> dist.ProcessGroup:
        """This rank's group; all ranks make all groups, in one order."""
        if (before, members) not in self._groups:
            block = before * members
            for first in range(0, self._world, block):
                for inner in range(before):
                    ranks = list(range(first + inner, first + block, before))
                    made = dist.new_group(ranks)
                    if dist.get_rank() in ranks:
                        self._groups[before, members] = made
        return self._groups[before, members]


def _bf16(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def _arithmetic(clock: Clock, device: torch.device, edge: int) -> dict[str, float]:
    half = torch.bfloat16 if _bf16(device) else torch.float16
    dtype = half if device.type == "cuda" else torch.float32
    a, b = (torch.ones(edge, edge, device=device, dtype=dtype) for _ in range(2))
    # As long as a core's time slices, that ranks which share cores are seen to wait for them.
    product = clock.seconds(lambda: torch.mm(a, b), times=20)
    small = torch.ones(256 if device.type == "cpu" else 2**20, 64, device=device, dtype=dtype)
    times = 100

    def multiply() -> None:
        for _ in range(times):
            small.mul_(1.0)

    tiny = torch.ones(1, device=device)
    return {
        "tensor": 2 * edge**3 / product,
        "vector": times * small.numel() / clock.seconds(multiply, times=20),
        "overhead": clock.seconds(lambda: [tiny.add_(1.0) for _ in range(times)]) / times,
    }


def copies(clock: Clock, device: torch.device, size: int) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.ones(max(size, 2**24), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / clock.seconds(lambda: target.copy_(source), times=5)


def _call(clock: Clock, rings: Rings, world: int) -> float:
    """Seconds by which a sum in a training step with layers split over two ranks is longer than by itself: the same products, of more rows."""
    took = []
    for split in (1, 2):
        layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
        kinds = {str(at): ("normal", "transposed")[at % 2] for at in range(_LAYERS)}
        parallelize(layers, Mesh(Grid(split, 1, 1, world // split)), kinds)
        rows = torch.ones(split * _ROWS, _WIDTH, requires_grad=True)
        took.append(clock.seconds(partial(_train, layers, rows), times=5))
    return max((took[1] - took[0]) / _LAYERS - rings.all_reduce(1, 2, 2 * _ROWS * _WIDTH), 0.0)


def _train(layers: nn.Module, rows: torch.Tensor) -> None:
    layers(rows).sum().backward()


def _memory(device: torch.device, ranks: int) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
