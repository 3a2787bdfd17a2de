"""The torch.distributed backend ``pccl``."""

from __future__ import annotations

import atexit
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from axonn_plugins.pccl import register as register
from axonn_plugins.pccl import rendezvous
from axonn_plugins.pccl.algorithms import algorithms
from axonn_plugins.pccl.algorithms.flat import Nodes
from axonn_plugins.pccl.answering import Answering
from axonn_plugins.pccl.build import BuildError, load
from axonn_plugins.pccl.choice import Choice, Measured, at_desks, choose, prescribed
from axonn_plugins.pccl.interfaces import node_name
from axonn_plugins.pccl.links import Fabric, Gone, Group, LinkError, Member
from axonn_plugins.pccl.network import Network
from axonn_plugins.pccl.options import Options
from axonn_plugins.pccl.program import Program, flatten
from axonn_plugins.pccl.tuner import known, learn
from axonn_plugins.pccl.vendor import Accelerator, asked_for, nodes_of, require

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier", "reduce")
"""Collectives that have schedules, by their numbers in the engine."""
_PREFIX, _CAME = "pccl", "came"
"""Prefix of our groups' keys, and the key that counts who has come."""
_SERVER_SECONDS = 5.0
"""Seconds beyond a group's timeout after which a store does not answer."""


@cache
def _fabric(process: int, interfaces: tuple[str, ...] | None, silence: float, read_memory: bool) -> Fabric:
    """One a process, for each way to make links; a forked child makes its own."""
    core = load().Core()
    atexit.register(core.close)
    return Fabric(core, interfaces, int(os.environ.get("LOCAL_RANK", 0)), silence, read_memory)


def fabric_of(options: Options) -> Fabric:
    """This process' links for groups with such options.

    Raises:
        BuildError: there is no compiler.
        ValueError: there is no such interface.
        OSError: it cannot be listened there.
    """
    return _fabric(os.getpid(), options.interfaces, options.silence, options.read_memory)


def create(options: Any, backend_options: Any = None) -> Any:
    """A group's backend; torch calls it on every member.

    With the algorithm "auto", the job's first group is tuned now where nothing is known of such a cluster.

    Args:
        options: torch's `DistributedBackendOptions`.
        backend_options: `Options`; None: those of the job's first group, else the environment's.

    Raises:
        BuildError: there is no compiler, here or at another member.
        LinkError: a member cannot be reached.
        ValueError: options that are not allowed, or not the same on all members.
    """
    rank, size = options.group_rank, options.group_size
    seconds = options.timeout.total_seconds()
    before = options.store.timeout  # of all the job's keys
    options.store.set_timeout(timedelta(seconds=seconds))
    store = Answering(dist.PrefixStore(_PREFIX, options.store), seconds + _SERVER_SECONDS)
    try:
        store = Answering(_of_this_time(store, size), store.seconds)
        return _create(options, store, backend_options)
    except (RuntimeError, ValueError, OSError):
        # Rank 0, which may hold the store, stays until the others know why, but not for ever.
        with suppress(RuntimeError):
            store.set(f"left{rank}", "")
            if rank == 0:
                store.wait([f"left{other}" for other in range(size)], timedelta(seconds=5))
        raise
    finally:
        options.store.set_timeout(before)


def _of_this_time(store: Answering, size: int) -> dist.Store:
    """Keys of the group's own: torch gives a group the name, and the keys, of one that was destroyed."""
    # No member leaves here before all have come, so the first of each `size` that come begin another time.
    return dist.PrefixStore(str((store.add(_CAME, 1) - 1) // size), store.store)


def _create(options: Any, store: Answering, backend_options: Any) -> Any:
    rank, size, timeout = options.group_rank, options.group_size, options.timeout.total_seconds()
    ranks = [int(number) for number in options.global_ranks_in_group]
    first = not ranks  # torch names none for the group of all
    try:
        chosen = _options(backend_options, first)
        agreed, native = chosen.agreed(), chosen.algorithm == "native"
        on_cuda = asked_for(Answering(options.store, store.seconds), f"{_PREFIX}/{_CAME}") == "cuda"
        if on_cuda:
            require()
        fabric = None if native else fabric_of(chosen)
    except (BuildError, ValueError, OSError) as error:
        rendezvous.tell_failure(store, rank, error)
        raise
    ranks = ranks or list(range(size))
    secret = rendezvous.secret_of(store, rank, ranks)
    group = Group(0) if fabric is None else fabric.join(secret, timeout)
    rendezvous.tell(store, rank, None if fabric is None else fabric.member, node_name(), agreed)
    # Of the accelerator's collectives, `device_tuner` times the vendor's library.
    tuned = chosen.algorithm == "auto" and size > 1 and not on_cuda

    def times(names: Sequence[str]) -> str | None:
        return known(chosen, nodes_of(names, ranks, chosen.ranks_per_node), first) if tuned else None

    roll = rendezvous.roll_of(store, rank, ranks, times)
    _agree(roll.options)
    nodes = nodes_of(roll.nodes, ranks, chosen.ranks_per_node)
    if fabric is None:
        backend: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo", store.store), rank, size, timedelta(seconds=timeout)
        )
    else:
        assert roll.members is not None  # options agree
        rendezvous.reachable(roll, ranks)
        numbers = [fabric.number(identity) for identity in roll.identities]
        fabric.core.add_group(group.number, numbers, ranks, rank, timeout)
        planner = Planner(fabric, group, roll.members, nodes, rank, ranks, timeout, chosen, numbers)
        backend = load().backend(fabric.core, group.number, rank, size, timeout, planner)
    if torch.cuda.is_available():
        backend = load().router(backend, rank, size, Accelerator(store.store, rank, nodes, ranks, timeout, chosen))
    if tuned:
        learn(backend, store, first, roll.beside)
    return backend


_first: Options | None = None


def _options(given: Any, first: bool) -> Options:
    """A group's options: given, or those of the group of all ranks where that is ours, or the environment's."""
    global _first
    if given is not None and not isinstance(given, Options):
        raise ValueError(
            f"pccl: pg_options = {given!r} are not options of pccl; pass axonn_plugins.pccl.Options(...), or leave them out"
        )
    if first:
        _first = given or Options.from_environment()
        return _first
    inherited = _first if dist.is_initialized() and "pccl" in str(dist.get_backend_config()) else None
    return given or inherited or Options.from_environment()


def options_of_world() -> Options:
    """Options of the group of all ranks, where that is pccl's."""
    assert _first is not None
    return _first


def _agree(options: Sequence[str]) -> None:
    for rank, other in enumerate(options):
        if other != options[0]:
            raise ValueError(
                f"pccl: rank {rank} of the group has {other}, but rank 0 has {options[0]}; give all ranks the same"
            )


def planner(group: dist.ProcessGroup | None = None, device: str = "cpu") -> Any:
    """The chooser of a group with this backend, by default all ranks': a `Planner`; on "cuda" an `Executor`."""
    return load().planner(_backend(group, device))


def forget(group: dist.ProcessGroup | None = None, device: str = "cpu") -> None:
    """Have the planner asked anew for every size."""
    load().forget(_backend(group, device))


@contextmanager
def using(choice: Choice | None, group: dist.ProcessGroup | None = None, device: str = "cpu") -> Iterator[None]:
    """Collectives of `group` that begin in the ``with`` block are done as `choice` says, on all ranks; None: as ever."""
    asked = planner(group, device)
    asked.fixed, before = choice, asked.fixed
    forget(group, device)
    try:
        yield
    finally:
        asked.fixed = before
        forget(group, device)


def _backend(group: dist.ProcessGroup | None, device: str) -> Any:
    found = (group or dist.group.WORLD)._get_backend(torch.device(device))  # type: ignore[union-attr]
    return found if device == "cpu" else load().on_device(found)


class Planner:
    """Answers the shim's question how a collective of so many bytes is to be done.

    Attributes:
        nodes: the group's ranks by node.
        measured: what choices rest on.
        network: what it is like between the nodes; None for one node, and where times do not matter.
        fixed: a choice that holds whatever was measured.
    """

    def __init__(
        self,
        fabric: Fabric,
        group: Group,
        members: Sequence[Member],
        nodes: Nodes,
        rank: int,
        ranks: Sequence[int],
        timeout: float,
        options: Options,
        numbers: Sequence[int],
    ) -> None:
        self.fabric, self.group, self.members, self.rank, self.timeout = fabric, group, members, rank, timeout
        self.nodes, self.ranks, self.options = nodes, ranks, options
        self.measured = Measured()
        self.network: Network | None = None
        self.fixed: Choice | None = None
        self._made: dict[tuple[str, Choice, int, bool], Any] = {}
        self._rank_of = {number: at for at, number in enumerate(numbers)}
        self._reaching: set[int] = set()

    def __call__(self, collective: int, size: int, root: int = 0, call: int = 0) -> Any:
        """The engine's program, and all links that it sends on.

        Args:
            collective: number in `COLLECTIVES`.
            size: bytes of all blocks.
            root: of a broadcast or reduce.
            call: number among those of the group; 0 where the program alone is wanted.
        """
        name = COLLECTIVES[collective]
        name = "all_reduce" if name in ("barrier", "reduce") else name
        choice = self.choose(name, size)
        desks = self.fixed is None and self.options.algorithm == "auto" and at_desks(name, size, self.nodes)
        if (name, choice, root, desks) not in self._made:
            self._made[name, choice, root, desks] = self._make(name, choice, root, desks, size, call)
        return self._made[name, choice, root, desks]

    def choose(self, collective: str, size: int) -> Choice:
        """Choose the algorithm of a collective of `size` bytes, all blocks together; the same on every rank."""
        if self.fixed is not None and collective != "broadcast":
            return self.fixed
        asked = prescribed(self.options, collective, size, len(self.members))
        return asked or self.measured.choose(collective, size, native=False) or choose(collective, size, self.nodes)

    def _make(self, collective: str, choice: Choice, root: int, desks: bool, size: int, call: int) -> Any:
        make = algorithms(collective, len(self.members))[choice.algorithm]
        options = {"root": root} if collective == "broadcast" else {}
        program = make(collective, self.rank, len(self.members), self.nodes, choice.chunks, **options)
        others = [rank for rank in range(len(self.members)) if rank != self.rank]
        self.meet(others if desks else receivers(program), f"{collective} of {size} bytes", call)
        return for_engine(program, zlib.crc32(repr((choice, root, desks)).encode()), desks)

    def meet(self, peers: Sequence[int], what: str, call: int = 0) -> None:
        """Make the links to the group's ranks `peers` that are not there.

        Args:
            peers: them.
            what: the call that needs them, in words.
            call: its number, of a collective that has one; such a call cannot be made again, and the group is given up.

        Raises:
            LinkError: one cannot be reached.
        """
        for peer in peers:
            try:
                self.fabric.connect(self.group, self.members[peer], self.timeout)
            except LinkError as error:
                if told := str(self.fabric.core.broken(self._key)):  # meanwhile, by others
                    raise LinkError(f"pccl: {told}") from error
                needs = f"{what}, call {call} of its group," if call else what
                why = f"rank {self.ranks[self.rank]}: {needs} needs rank {self.ranks[peer]}, but {error}"
                if call:
                    self._give_up(why)
                raise LinkError(f"pccl: {why}") from error

    def reach(self, number: int) -> None:
        """Make a link to a peer that a call has long waited for, by a thread of its own; the call fails where it has ended.

        Args:
            number: the engine's for the peer.
        """
        rank = self._rank_of[number]
        if rank in self._reaching:
            return
        self._reaching.add(rank)

        def connect() -> None:
            try:
                self.fabric.connect(self.group, self.members[rank], self.timeout)
            except LinkError as error:
                if isinstance(error, Gone):
                    who, whom = self.ranks[self.rank], self.ranks[rank]
                    why = f"rank {who}: a call that was under way needs rank {whom}, but {error}"
                    self._give_up(why)
            finally:
                self._reaching.discard(rank)

        threading.Thread(target=connect, name="pccl-reach", daemon=True).start()

    @property
    def _key(self) -> int:
        return self.group.number

    def _give_up(self, why: str) -> None:
        self.fabric.core.give_up(self._key, why)


def for_engine(program: Program, digest: int, desks: bool = False) -> Any:
    """The engine's form of a program.

    Args:
        program: a rank's.
        digest: of what must be the same on all ranks.
        desks: whether it may be done in the node's shared memory instead.
    """
    flat = flatten(program)
    sizes = (flat["size"][0], flat["rank"][0], flat["chunks"][0], flat["work_slots"][0])
    return load().Program(*sizes, digest, flat["ops"], flat["spans"], flat["after"], desks)


def receivers(program: Program) -> list[int]:
    """The ranks that a program sends to, in the order in which it first does."""
    return list(dict.fromkeys(op.peer for op in program.ops if op.kind == 0))
