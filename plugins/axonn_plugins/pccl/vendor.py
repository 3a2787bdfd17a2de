"""The accelerator's side of a group: NCCL's backend (on AMD's GPUs, RCCL's) with ours in front of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_plugins.pccl.build import load
from axonn_plugins.pccl.choice import NATIVE, Measured
from axonn_plugins.pccl.executor import Executor
from axonn_plugins.pccl.nodewise import even
from axonn_plugins.pccl.options import Options

Nodes = tuple[tuple[int, ...], ...]
_measured: dict[tuple[int, ...], Measured] = {}


def measured_on(nodes: Sequence[Sequence[int]]) -> Measured:
    """Times of groups with as many ranks on each node; none before `axonn_plugins.pccl.device_tuner.tune` was called on one."""
    return _measured.setdefault(tuple(map(len, nodes)), Measured())


def window_of(backend: Any) -> Callable[[int], Tensor] | None:
    """A maker of memory that is registered with NCCL as a symmetric window; None where this torch's NCCL (before 2.27), GPU or driver has none."""
    register = getattr(backend, "register_mem_pool", None)
    if register is None or "symm" not in (register.__doc__ or ""):
        return None
    try:
        allocator = backend.mem_allocator
    except (AttributeError, RuntimeError):  # NCCL says so of GPUs that cannot share memory by handles
        return None
    pools: list[Any] = []

    def window(size: int) -> Tensor:
        pools.append(torch.cuda.MemPool(allocator))
        with torch.cuda.use_mem_pool(pools[-1]):
            room = torch.empty(size, dtype=torch.uint8, device="cuda")
        register(pools[-1], symm=True)
        return room

    return window


def asked_for(store: Any, written: str) -> str:
    """The device type that torch makes a backend for; the first where it is for several, as in "cpu:pccl,cuda:pccl".

    torch does not tell, except in the prefix of the store that it hands over.

    Args:
        store: torch's.
        written: a key that this rank has written to it.
    """
    below = getattr(store, "underlying_store", None)
    return "cuda" if below is not None and below.check([f"cuda//{written}"]) else "cpu"


def require() -> None:
    """Check that there is a device and a library.

    Raises:
        ValueError: there is none.
    """
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise ValueError(
            'pccl: "cuda:pccl" needs a CUDA device and a torch with NCCL, which are not here; use "cpu:pccl"'
        )


@dataclass(frozen=True)
class Accelerator:
    """Makes the backend for the accelerator's tensors of a group; every member may do so when it needs it.

    Attributes:
        store: through which the vendor's library finds the members.
        rank: this rank.
        nodes: the group's ranks by node.
        ranks: their numbers in the job.
        timeout: seconds.
        options: what the user chose.
    """

    store: Any
    rank: int
    nodes: Nodes
    ranks: Sequence[int]
    timeout: float
    options: Options

    def __call__(self) -> Any:
        """The backend.

        Raises:
            ValueError: there is no such device.
            BuildError: our part of it cannot be compiled.
        """
        require()
        inner = self._vendor("all", range(len(self.ranks)))
        if self.options.algorithm == NATIVE:
            return inner
        local = None
        if even(self.nodes):
            here = next(number for number, node in enumerate(self.nodes) if self.rank in node)
            local = inner if len(self.nodes) == 1 else self._vendor(f"node{here}", self.nodes[here])
        executor = Executor(
            inner, local, self.rank, self.nodes, self.options, measured_on(self.nodes), window_of(inner)
        )
        return load().device_backend(inner, self.rank, len(self.ranks), executor, "cuda")

    def _vendor(self, name: str, members: Sequence[int]) -> Any:
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self.timeout)
        options.global_ranks_in_group = [self.ranks[member] for member in members]
        options.group_name = f"pccl {name}"
        store = dist.PrefixStore(f"cuda {name}", self.store)
        backend = dist.ProcessGroupNCCL(store, list(members).index(self.rank), len(members), options)
        backend._set_sequence_number_for_group()
        return backend


def nodes_of(names: Sequence[str], ranks: Sequence[int], ranks_per_node: int | str) -> Nodes:
    """A group's ranks by node.

    Args:
        names: each rank's node.
        ranks: each rank's number in the job.
        ranks_per_node: "auto", or how many consecutive ranks of the job are taken for a node.
    """
    by_node: dict[str | int, list[int]] = {}
    for number, (name, rank) in enumerate(zip(names, ranks, strict=True)):
        by_node.setdefault(name if isinstance(ranks_per_node, str) else rank // ranks_per_node, []).append(number)
    return tuple(tuple(node) for node in by_node.values())
