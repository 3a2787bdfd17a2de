"""The torch.distributed backend ``pccl``."""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plugins.pccl import register as register
from plugins.pccl.algorithms import algorithms
from plugins.pccl.algorithms.flat import Nodes
from plugins.pccl.build import BuildError, load
from plugins.pccl.choice import NATIVE, Choice, Measured, choose
from plugins.pccl.links import Fabric, Group, Member
from plugins.pccl.options import Options
from plugins.pccl.program import Program, flatten
from plugins.pccl.tuning_file import key_of, tuning_file
from plugins.pccl.tuning_file import read as read_tuning

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier")
"""By their numbers in the engine."""
_FEW_MESSAGES, _FEW_STEPS = 2**18, 2**21  # bytes up to which these cost more than bytes do


@cache
def _fabric(process: int, interfaces: tuple[str, ...] | None) -> Fabric:
    """One a process; a forked child makes its own."""
    return Fabric(load().Core(), interfaces, local_rank=int(os.environ.get("LOCAL_RANK", 0)))


def create(options: Any, backend_options: Any = None) -> Any:
    """A group's backend; torch calls it on every member.

    Args:
        options: torch's `DistributedBackendOptions`.
        backend_options: `Options`; None: those of the job's first group, else the environment's.

    Raises:
        BuildError: there is no compiler, here or at another member.
        LinkError: a member cannot be reached.
        ValueError: options that are not allowed, or not the same on all members.
    """
    rank, size = options.group_rank, options.group_size
    store = dist.PrefixStore("pccl", options.store)
    store.set_timeout(timedelta(seconds=options.timeout.total_seconds()))
    try:
        return _create(options, store, backend_options)
    except (BuildError, ValueError, OSError):
        # Rank 0, which may hold the store, stays until the others know why, but not for ever.
        store.set(f"left{rank}", "")
        if rank == 0:
            with suppress(dist.DistError):
                store.wait([f"left{other}" for other in range(size)], timedelta(seconds=5))
        raise


def _create(options: Any, store: Any, backend_options: Any) -> Any:
    rank, size, timeout = options.group_rank, options.group_size, options.timeout.total_seconds()
    ranks = [int(number) for number in options.global_ranks_in_group]
    try:
        chosen = _options(backend_options, first=not ranks)  # torch names no ranks for the group of all
        native = chosen.algorithm == "native"
        fabric = None if native else _fabric(os.getpid(), chosen.interfaces)
    except (BuildError, ValueError, OSError) as error:
        # Said to the others, who would wait.
        for name in (f"member{rank}", *(["secret"] if rank == 0 else [])):
            store.set(name, json.dumps({"error": str(error), "rank": rank}))
        raise
    if rank == 0:
        store.set("secret", json.dumps({"secret": secrets.token_hex(32)}))
    group = Group(bytes.fromhex(_read(store.get("secret"))["secret"]))
    key = 0 if fabric is None else fabric.join(group)
    record = None if fabric is None else fabric.member.record()
    store.set(f"member{rank}", json.dumps({"member": record, "options": chosen.agreed()}))
    records = [_read(found) for found in store.multi_get([f"member{other}" for other in range(size)])]
    _agree([found["options"] for found in records])
    inner = dist.ProcessGroupGloo(dist.PrefixStore("inner", store), rank, size, timedelta(seconds=timeout))
    if fabric is None:
        return inner
    members = [Member.read(found["member"]) for found in records]
    numbers = [fabric.number(member.identity) for member in members]
    ranks = ranks or list(range(size))
    fabric.core.add_group(key, numbers, ranks, rank, timeout)
    planner = _Planner(fabric, group, members, ranks, rank, timeout, chosen)
    planner.measured = _measured(store, rank, chosen, planner.nodes)
    return load().backend(fabric.core, key, rank, size, timeout, inner, planner)


def _measured(store: Any, rank: int, options: Options, nodes: Nodes) -> Measured:
    """What was measured of this cluster: rank 0 reads for all, who must choose alike."""
    if rank == 0:
        try:
            found: dict[str, Any] = {
                "times": read_tuning(Path(options.tuning_file or tuning_file()), key_of(nodes)).dump()
            }
        except (ValueError, OSError) as error:
            store.set("tuning", json.dumps({"error": str(error), "rank": rank}))
            raise
        store.set("tuning", json.dumps(found))
    return Measured.load(_read(store.get("tuning"))["times"])


_first: Options | None = None


def _options(given: Any, first: bool) -> Options:
    """A group's options: given, or those of the group of all ranks where that is ours, or the environment's."""
    global _first
    if given is not None and not isinstance(given, Options):
        raise ValueError(
            f"pccl: pg_options = {given!r} are not options of pccl; pass plugins.pccl.Options(...), or leave them out"
        )
    if first:
        _first = given or Options.from_environment()
        return _first
    inherited = _first if dist.is_initialized() and "pccl" in str(dist.get_backend_config()) else None
    return given or inherited or Options.from_environment()


def options_of_world() -> Options:
    """Those of the group of all ranks, which is pccl's."""
    assert _first is not None
    return _first


def _read(record: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(record)
    if "error" in found:
        raise BuildError(f"rank {found['rank']} of the group cannot use pccl: {found['error']}")
    return found


def _agree(options: Sequence[str]) -> None:
    for rank, other in enumerate(options):
        if other != options[0]:
            raise ValueError(
                f"pccl: rank {rank} of the group has {other}, but rank 0 has {options[0]}; give all ranks the same"
            )


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

    def __init__(
        self,
        fabric: Fabric,
        group: Group,
        members: Sequence[Member],
        ranks: Sequence[int],
        rank: int,
        timeout: float,
        options: Options,
    ) -> None:
        self.fabric, self.group, self.members, self.rank, self.timeout = fabric, group, members, rank, timeout
        self.options = options
        by_node: dict[str | int, list[int]] = {}
        for number, member in enumerate(members):
            several = options.ranks_per_node
            by_node.setdefault(member.node if several == "auto" else ranks[number] // several, []).append(number)
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

    def _prescribed(self, collective: str, size: int) -> Choice | None:
        """What the options say; None for "auto"."""
        algorithm = self.options.algorithm
        if algorithm == "auto":
            return None
        if collective == "broadcast":
            return {"ring": Choice("chain", 4), "recursive": Choice("binomial")}.get(algorithm)
        if algorithm == "hierarchical":
            few = Choice("led_radix4" if size <= _FEW_MESSAGES else "hierarchical_log_direct")
            return few if size <= _FEW_STEPS else Choice("hierarchical_ring_direct", 2)
        if algorithm == "recursive" and len(self.members) & (len(self.members) - 1):
            return Choice("bruck")
        return Choice(algorithm)

    def choose(self, collective: str, size: int, native: bool = True) -> Choice:
        """How a collective of `size` bytes, all blocks together, is done; the same on every rank."""
        if self.fixed is not None and collective != "broadcast" and (native or self.fixed.algorithm != NATIVE):
            return self.fixed
        prescribed = self._prescribed(collective, size)
        return prescribed or self.measured.choose(collective, size, native) or choose(collective, size, self.nodes)

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
