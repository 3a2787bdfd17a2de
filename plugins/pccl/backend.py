"""The torch.distributed backend ``pccl``."""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from plugins.pccl.algorithms import algorithms
from plugins.pccl.build import load
from plugins.pccl.choice import NATIVE, Choice, Measured, choose
from plugins.pccl.links import Fabric, Group, Member
from plugins.pccl.program import Program, flatten
from plugins.pccl.tuning_file import key_of, tuning_file
from plugins.pccl.tuning_file import read as read_tuning

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier")
"""By their numbers in the engine."""


def register() -> None:
    """Make ``init_process_group("pccl")``, ``"cpu:pccl"`` and ``new_group(backend="pccl")`` known to torch."""
    if "pccl" not in dist.Backend.backend_list:
        dist.Backend.register_backend("pccl", create, extended_api=True, devices=["cpu"])


@cache
def _fabric(process: int) -> Fabric:
    """One a process; a forked child makes its own."""
    return Fabric(load().Core(), local_rank=int(os.environ.get("LOCAL_RANK", 0)))


def create(options: Any, backend_options: Any = None) -> Any:
    """A group's backend; torch calls it on every member.

    Args:
        options: torch's `DistributedBackendOptions`.
        backend_options: of this backend; there are none.

    Raises:
        BuildError: there is no compiler.
        LinkError: a member cannot be reached.
    """
    module, fabric = load(), _fabric(os.getpid())
    rank, size = options.group_rank, options.group_size
    timeout = timedelta(seconds=options.timeout.total_seconds())
    store = dist.PrefixStore("pccl", options.store)
    store.set_timeout(timeout)
    if rank == 0:
        store.set("secret", secrets.token_hex(32))
    group = Group(bytes.fromhex(store.get("secret").decode()))
    key = fabric.join(group)
    store.set(f"member{rank}", fabric.member.record())
    members = [Member.read(store.get(f"member{other}")) for other in range(size)]
    numbers = [fabric.number(member.identity) for member in members]
    ranks = [int(number) for number in options.global_ranks_in_group] or list(range(size))  # torch names none for all
    fabric.core.add_group(key, numbers, ranks, rank, timeout.total_seconds())
    planner = _Planner(fabric, group, members, rank, timeout.total_seconds())
    if rank == 0:  # reads for all, who must choose alike
        store.set("tuning", read_tuning(tuning_file(), key_of(planner.nodes)).dump())
    planner.measured = Measured.load(store.get("tuning").decode())
    inner = dist.ProcessGroupGloo(dist.PrefixStore("inner", store), rank, size, timeout)
    return module.backend(fabric.core, key, rank, size, timeout.total_seconds(), inner, planner)


def planner(group: dist.ProcessGroup | None = None) -> _Planner:
    """That of a group with this backend, by default of the group of all ranks."""
    found: _Planner = load().planner(_backend(group))
    return found


def forget(group: dist.ProcessGroup | None = None) -> None:
    """Have the planner asked anew for every size."""
    load().forget(_backend(group))


@contextmanager
def using(choice: Choice | None, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Collectives of `group` that begin in the ``with`` block are done as `choice` says on every rank; None: as ever."""
    asked = planner(group)
    asked.fixed, before = choice, asked.fixed
    forget(group)
    try:
        yield
    finally:
        asked.fixed = before
        forget(group)


def _backend(group: dist.ProcessGroup | None) -> Any:
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))  # type: ignore[union-attr]


class _Planner:
    """Answers the shim's question how a collective of so many bytes is to be done.

    Attributes:
        nodes: the group's ranks by node.
        measured: what choices rest on.
        fixed: a choice that holds whatever was measured.
    """

    def __init__(self, fabric: Fabric, group: Group, members: Sequence[Member], rank: int, timeout: float) -> None:
        self.fabric, self.group, self.members, self.rank, self.timeout = fabric, group, members, rank, timeout
        by_node: dict[str, list[int]] = {}
        for number, member in enumerate(members):
            by_node.setdefault(member.node, []).append(number)
        self.nodes = tuple(tuple(node) for node in by_node.values())
        self.measured = Measured()
        self.fixed: Choice | None = None
        self._made: dict[tuple[str, Choice, int], Any] = {}

    def __call__(self, collective: int, size: int, root: int, native: bool) -> Any:
        """The engine's program, and all links that it sends on; None for the native library.

        Args:
            collective: number in `COLLECTIVES`.
            size: bytes of all blocks.
            root: of a broadcast.
            native: whether the native library can do it.
        """
        name = COLLECTIVES[collective]
        name = "all_reduce" if name == "barrier" else name
        choice = self.choose(name, size, native)
        if choice.algorithm == NATIVE:
            return None
        if (name, choice, root) not in self._made:
            self._made[name, choice, root] = self._make(name, choice, root)
        return self._made[name, choice, root]

    def choose(self, collective: str, size: int, native: bool = True) -> Choice:
        """How a collective of `size` bytes, all blocks together, is done; the same on every rank."""
        if self.fixed is not None and collective != "broadcast" and (native or self.fixed.algorithm != NATIVE):
            return self.fixed
        return self.measured.choose(collective, size, native) or choose(collective, size, self.nodes)

    def _make(self, collective: str, choice: Choice, root: int) -> Any:
        make = algorithms(collective, len(self.members))[choice.algorithm]
        options = {"root": root} if collective == "broadcast" else {}
        program = make(collective, self.rank, len(self.members), self.nodes, choice.chunks, **options)
        for peer in receivers(program):
            self.fabric.connect(self.group, self.members[peer], self.timeout)
        flat = flatten(program)
        digest = zlib.crc32(repr((choice, root)).encode())
        sizes = (flat["size"][0], flat["rank"][0], flat["chunks"][0], flat["work_slots"][0])
        return load().Program(*sizes, digest, flat["ops"], flat["spans"], flat["after"])


def receivers(program: Program) -> list[int]:
    """The ranks that a program sends to, in the order in which it first does."""
    return list(dict.fromkeys(op.peer for op in program.ops if op.kind == 0))
