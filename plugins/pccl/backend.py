"""The torch.distributed backend ``pccl``."""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from plugins.pccl.algorithms import algorithms
from plugins.pccl.build import load
from plugins.pccl.choice import Choice, choose
from plugins.pccl.links import Fabric, Group, Member
from plugins.pccl.program import Program, flatten

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
    inner = dist.ProcessGroupGloo(dist.PrefixStore("inner", store), rank, size, timeout)
    return module.backend(fabric.core, key, rank, size, timeout.total_seconds(), inner, planner)


class _Planner:
    """Answers the shim's question how a collective of so many bytes is to be done."""

    def __init__(self, fabric: Fabric, group: Group, members: Sequence[Member], rank: int, timeout: float) -> None:
        self.fabric, self.group, self.members, self.rank, self.timeout = fabric, group, members, rank, timeout
        by_node: dict[str, list[int]] = {}
        for number, member in enumerate(members):
            by_node.setdefault(member.node, []).append(number)
        self.nodes = tuple(tuple(node) for node in by_node.values())
        self._made: dict[tuple[str, Choice, int], Any] = {}

    def __call__(self, collective: int, size: int, root: int) -> Any:
        """The engine's program, and all links that it sends on.

        Args:
            collective: number in `COLLECTIVES`.
            size: bytes of all blocks.
            root: of a broadcast.
        """
        name = COLLECTIVES[collective]
        name = "all_reduce" if name == "barrier" else name
        choice = choose(name, size, self.nodes)
        if (name, choice, root) not in self._made:
            self._made[name, choice, root] = self._make(name, choice, root)
        return self._made[name, choice, root]

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
