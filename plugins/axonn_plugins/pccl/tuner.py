"""Times the choices that come into question on a group, so that the fastest is taken from then on.

Every rank makes the same calls; times are those of the slowest rank, so all ranks decide alike. Calls go to the group's
backend itself, which works before torch knows the group.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions

from axonn_plugins.pccl.algorithms.flat import Nodes
from axonn_plugins.pccl.build import BuildError, load
from axonn_plugins.pccl.choice import Choice, Measured
from axonn_plugins.pccl.contest import BUDGET, COLLECTIVES, SIZES, Clock, Trial, contest
from axonn_plugins.pccl.links import LinkError
from axonn_plugins.pccl.network import Network, probe
from axonn_plugins.pccl.options import Options
from axonn_plugins.pccl.tuning_file import key_of, read, tuning_file, write

if TYPE_CHECKING:
    from axonn_plugins.pccl.backend import Planner

_PATIENCE = 60.0  # seconds for one call
_WORDS = 512  # bytes of an error that all are told
_network: Network | None = None  # between the nodes of the group of all ranks


def known(options: Options, nodes: Nodes, first: bool) -> str | None:
    """Times that were measured of this cluster, and the network between its nodes, for all members; None where this has to be timed first.

    Args:
        options: of rank 0 of the group, which calls it for all, who must choose alike.
        nodes: the group's ranks by node.
        first: whether it is the group of all ranks.

    Raises:
        ValueError: the file of times cannot be read; or OSError.
    """
    return None if _probes(nodes, first) else _said(options, nodes, _network if len(nodes) > 1 else None)


def learn(backend: Any, store: Any, first: bool, told: str | None) -> None:
    """Give a new group the times of this cluster; every member calls it.

    Args:
        backend: the group's, to be asked for its planner.
        store: the group's own.
        first: whether it is the group of all ranks, which is tuned now if nothing is known and the options allow it.
        told: what rank 0 has told of them, by `known`.

    Raises:
        LinkError: a member could not take part; all members say so.
        ValueError: the file of times cannot be read.
    """
    global _network
    planner: Planner = load().planner(backend)
    found = json.loads(told or _probed(planner, backend, store, first))
    if "error" in found:
        raise BuildError(f"rank 0 of the group cannot use pccl: {found['error']}")
    planner.network = found["network"] and Network(*found["network"])
    measured = _loaded(found["times"])
    if first:
        _network = planner.network
    planner.measured = measured
    if first and planner.options.tunes() and not measured.times:
        _measure_and_keep(backend, _file(planner.options), SIZES)


def tune(
    group: dist.ProcessGroup | None = None, file: Path | None = None, sizes: Sequence[int] = SIZES, again: bool = False
) -> Measured:
    """Measure on a group with the backend "pccl", or read what was measured before; every member calls it.

    Args:
        group: by default all ranks.
        file: where times are kept; by default that of the options. Of this and what follows rank 0's counts.
        sizes: bytes of all blocks.
        again: measure even if there are times.

    Returns:
        The times, which the group goes by from now on. Groups made later with the same node map find them in the file.

    Raises:
        LinkError: a member could not take part; all members say so.
        ValueError: there is nothing to choose, or the file cannot be read.
    """
    backend = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    planner: Planner = load().planner(backend)
    if planner.options.algorithm != "auto" or backend.size() == 1:
        raise ValueError(
            f"pccl: a group of {backend.size()} with algorithm {planner.options.algorithm!r} leaves nothing to choose; "
            'tune one of several ranks with "auto"'
        )
    file = file or _file(planner.options)
    found: tuple[Measured | str, Sequence[int]] = Measured(), sizes
    if backend.rank() == 0 and not again:
        try:
            found = read(file, _key(planner.options, planner.nodes), planner.network), sizes
        except (ValueError, OSError) as error:
            found = str(error), sizes
    told = [found]
    dist.broadcast_object_list(told, group=group, group_src=0)
    known, sizes = told[0]
    if isinstance(known, str):
        raise ValueError(known)
    planner.measured = known
    if not planner.measured.times:
        _measure_and_keep(backend, file, sizes)
    load().forget(backend)
    return planner.measured


def measure(backend: Any, sizes: Sequence[int] = SIZES, budget: float = BUDGET) -> Measured:
    """Seconds of the choices that come into question; every member calls it.

    Raises:
        LinkError: a member cannot reach another.
    """
    watch = _Watch(backend, max(sizes))
    trials = contest(watch.planner.nodes, sizes, budget)
    trial = next(trials)
    while True:
        try:
            trial = trials.send(watch.time(trial))
        except StopIteration as end:
            found: Measured = end.value
            return found


def _probes(nodes: Nodes, first: bool) -> bool:
    """True where the network between nodes is timed now."""
    return len(nodes) > 1 and (first or _network is None)


def _said(options: Options, nodes: Nodes, network: Network | None) -> str:
    times = read(_file(options), _key(options, nodes), network).dump()
    return json.dumps({"times": times, "network": network and [network.latency, network.rate]})


def _probed(planner: Planner, backend: Any, store: Any, first: bool) -> str:
    """Time a link between two nodes; returns what `known` says with it."""
    rank, peer = backend.rank(), planner.nodes[1][0]
    network = None
    if store.add("here", 1) == backend.size():
        store.set("all here", "")
    if rank in (0, peer):
        store.wait(["all here"])  # processes that still start would disturb
        network = probe(backend, rank, peer)
    if rank == 0:
        try:
            store.set("tuning", _said(planner.options, planner.nodes, network))
        except (ValueError, OSError) as error:
            store.set("tuning", json.dumps({"error": str(error)}))
            raise
    return str(store.get("tuning"), "utf-8")


@lru_cache(maxsize=8)
def _loaded(times: str) -> Measured:
    """The same for all groups of a job, of which there may be many."""
    return Measured.load(times)


def _measure_and_keep(backend: Any, file: Path, sizes: Sequence[int]) -> None:
    planner: Planner = load().planner(backend)
    began = time.perf_counter()
    planner.measured = measure(backend, sizes)
    if backend.rank() != 0:
        return
    ways = sum(len(set().union(*by.values())) for by in planner.measured.times.values())
    took = f"PCCL: timed {ways} ways on {_shape(planner.nodes)} in {time.perf_counter() - began:.1f} s"
    try:
        write(file, _key(planner.options, planner.nodes), planner.network, planner.measured)
        print(f"{took}; kept in {file}", file=sys.stderr, flush=True)
    except (OSError, ValueError) as error:
        print(f"{took}; used in this job only, as they cannot be kept in {file}: {error}", file=sys.stderr, flush=True)


def _file(options: Options) -> Path:
    return Path(options.tuning_file or tuning_file())


def _key(options: Options, nodes: Nodes) -> str:
    return key_of(nodes, options.interfaces)


def _shape(nodes: Sequence[Sequence[int]]) -> str:
    least, most = (rule(len(node) for node in nodes) for rule in (min, max))
    ranks = str(most) if least == most else f"{least} to {most}"
    return f"{len(nodes)} node{'s' * (len(nodes) > 1)} x {ranks} rank{'s' * (most > 1)}"


class _Watch:
    """Times trials on a group, all members together.

    Args:
        backend: the group's.
        largest: bytes of the largest trial.
    """

    def __init__(self, backend: Any, largest: int) -> None:
        self.backend, self.planner = backend, load().planner(backend)
        self._rank, self._ranks = backend.rank(), backend.size()
        self._own = torch.zeros(_each(largest, self._ranks))
        self._whole = self._own.repeat(self._ranks)  # sums of zeros stay zero
        self._patience = min(self.planner.timeout, _PATIENCE)
        self._ready: set[tuple[str, Choice]] = set()
        self._began = time.perf_counter()

    def time(self, trial: Trial) -> Clock:
        """Time a call on the slowest rank; returns that, and the time since the beginning."""
        call = operation(self.backend, trial.collective, trial.size, (self._whole, self._own), self._patience)
        self._prepare(trial)
        with self._as(trial.choice):
            began = time.perf_counter()
            for _ in range(trial.calls):
                call()
            ended = time.perf_counter()
        seconds, now = self._greatest((ended - began) / trial.calls, ended - self._began)
        return seconds, now

    def _prepare(self, trial: Trial) -> None:
        """Make programs and links, in which a rank may fail, before others wait for it in the collective."""
        if (trial.collective, trial.choice) in self._ready:
            return
        self._ready.add((trial.collective, trial.choice))
        error = ""
        before, self.planner.timeout = self.planner.timeout, self._patience / 2  # less than others wait
        try:
            with self._as(trial.choice):
                self.planner(COLLECTIVES.index(trial.collective), trial.size)
        except (RuntimeError, ValueError, OSError) as caught:
            error = str(caught)
        self.planner.timeout = before
        failed = int(self._greatest(self._rank + 1 if error else 0)[0])
        if failed:
            text = torch.zeros(_WORDS, dtype=torch.uint8)
            if failed == self._rank + 1:
                words = error.encode()[:_WORDS]
                text[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
            self._maximum(text)
            words = bytes(text.tolist()).rstrip(b"\0")
            raise LinkError(f"pccl: rank {failed - 1} of the group cannot be tuned: {words.decode(errors='ignore')}")

    @contextmanager
    def _as(self, choice: Choice) -> Iterator[None]:
        self.planner.fixed = choice
        load().forget(self.backend)
        try:
            yield
        finally:
            self.planner.fixed = None
            load().forget(self.backend)

    def _greatest(self, *values: float) -> list[float]:
        """The greatest over the ranks, of each value; no rank goes on before all have come here."""
        table = torch.tensor(values, dtype=torch.float64)
        self._maximum(table)
        found: list[float] = table.tolist()
        return found

    def _maximum(self, table: Tensor) -> None:
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        options.timeout = timedelta(seconds=self._patience)
        self.backend.allreduce([table], options).wait()


def _each(size: int, ranks: int) -> int:
    return max(1, size // 4 // ranks)


def operation(
    backend: Any, collective: str, size: int, memory: tuple[Tensor, Tensor], patience: float
) -> Callable[[], None]:
    """A collective of about `size` bytes of float32 in memory for all blocks and for one, given `patience` seconds."""
    each = _each(size, backend.size())
    whole, own = memory[0][: each * backend.size()], memory[1][:each]
    kinds: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "all_gather": (AllgatherOptions(), lambda how: backend._allgather_base(whole, own, how)),
        "reduce_scatter": (ReduceScatterOptions(), lambda how: backend._reduce_scatter_base(own, whole, how)),
        "all_reduce": (AllreduceOptions(), lambda how: backend.allreduce([whole], how)),
    }
    options, call = kinds[collective]
    options.timeout = timedelta(seconds=patience)
    return lambda: call(options).wait()
