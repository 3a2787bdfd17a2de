"""Start ranks on this machine: fork, watch, forward signals, and never leave one waiting for a dead one."""

from __future__ import annotations

import ctypes
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from axonn_plugins.config.base import ConfigError

# What is imported with the first optimizer of torch and the first engine, by the package that must be there already: it takes
# longer than they themselves, and so is imported once before the ranks are forked, not in each of them.
_IMPORTED_LATE = {
    "torch": ("torch._dynamo",),
    "deepspeed": (
        "deepspeed.compile.backend",
        "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "axonn_plugins.hosts.deepspeed.config_hook",
        "axonn_plugins.hosts.deepspeed.pipeline.engine",
        "axonn_plugins.hosts.deepspeed.ted.engine",
    ),
}


_GRACE = 3.0
"""Seconds that ranks have to clear up when a signal has ended one of them."""
_ECHO, _LONGEST_END = 1.0, 30.0
"""Seconds in which a rank that lost its connection waits for the word of who caused it, and while one is ending that has not ended."""


_OF_RANK = 16 * 2**20
"""Bytes that a rank takes at least, forked where torch is imported already."""


class RankFailed(RuntimeError):
    """A rank ended with an error.

    Attributes:
        rank: which one.
        error: the exception it raised, when it could be sent, else None.
        details: its traceback, or its exit code in words.
    """

    def __init__(self, rank: int, error: BaseException | None, details: str) -> None:
        super().__init__(f"rank {rank} failed:\n{details}")
        self.rank, self.error, self.details = rank, error, details


class Interrupted(KeyboardInterrupt):
    """Ranks were ended by a signal that came to this process.

    Attributes:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Passed:
    """SIGINT and SIGTERM, which go on to the ranks; a second Ctrl-C kills those that take their time.

    Args:
        processes: the ranks, as many as are started.
    """

    numbers = (signal.SIGINT, signal.SIGTERM)
    _APART = 1.0
    """Seconds from which a second SIGINT is another Ctrl-C, and not a launcher that passes on the first."""

    def __init__(self, processes: list[Any]) -> None:
        self.processes = processes
        self.first: int | None = None
        self._came, self._missed = 0.0, False

    def __enter__(self) -> _Passed:
        # No signal comes between a rank's fork and its own handlers, or to this process before all ranks are there.
        signal.pthread_sigmask(signal.SIG_BLOCK, self.numbers)
        self._previous = {number: signal.signal(number, self._pass_on) for number in self.numbers}
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self.let_come()

    def let_come(self) -> None:
        """Unblock them."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.numbers)

    def check(self) -> None:
        """Raise where a signal has come that the ranks did not answer in their own way.

        Raises:
            Interrupted: with the first.
        """
        if self.first is not None and (self._missed or any(one.exitcode == -self.first for one in self.processes)):
            raise Interrupted(self.first)

    def _pass_on(self, number: int, frame: Any) -> None:
        now, alive = time.monotonic(), [process for process in self.processes if process.is_alive()]
        if self.first is None:
            self.first, self._came, self._missed = number, now, not alive
        elif number == signal.SIGINT and now - self._came > self._APART:
            number = signal.SIGKILL
        for process in alive:
            os.kill(process.pid, number)


def free_port() -> int:
    """A TCP port that is free, and that no connection of another process is given before this one binds it."""
    ephemeral = 32768
    with suppress(OSError):
        ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(10000, max(ephemeral, 20000))
    for port in random.SystemRandom().sample(ports, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise RuntimeError(f"100 ports between {ports.start} and {ports.stop} are in use: free some of them")


def launch(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    timeout: float | None = None,
    place: Callable[[int], Mapping[str, str]] | None = None,
) -> list[Any]:
    """Run `function(*arguments)` on `ranks` forked processes with torchrun's environment variables set.

    SIGINT and SIGTERM are passed on to the ranks, which may finish in their own way; a second SIGINT kills them. When one rank
    fails the others are killed. A rank whose parent dies is killed by the kernel (Linux).

    Args:
        function: what each rank runs; it finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in os.environ.
        ranks: how many.
        arguments: passed on.
        timeout: seconds after which all ranks are killed.
        place: called in each rank's process with the rank, before `function`, to move it to where it belongs; the
            environment variables that it returns replace those set here.

    Returns:
        What each rank returned, by rank.

    Raises:
        ConfigError: this machine has no room for so many.
        RankFailed: the first rank that failed.
        Interrupted: a signal ended the ranks.
        TimeoutError: the ranks did not finish in time.
    """
    _require_room(ranks)
    for package, modules in _IMPORTED_LATE.items():
        for module in modules if package in sys.modules else ():
            with suppress(ImportError):
                importlib.import_module(module)
    fork = multiprocessing.get_context("fork")
    port, all_reported = free_port(), fork.Event()
    readers: dict[Connection, int] = {}
    processes: list[Any] = []
    sys.stdout.flush()
    with _Passed(processes) as signals:
        try:
            for rank in range(ranks):
                reader, writer = fork.Pipe(duplex=False)
                given = (function, arguments, rank, ranks, port, place, os.getpid(), writer, all_reported)
                process = fork.Process(target=_rank, args=given, daemon=False)
                process.start()
                writer.close()
                readers[reader] = rank
                processes.append(process)
            signals.let_come()
            results = _collect(readers, processes, timeout)
            all_reported.set()
            for process in processes:
                process.join()
            signals.check()
            return results
        except RankFailed:
            if signals.first is None:
                raise
            for process in processes:
                process.join(_GRACE)
            raise Interrupted(signals.first) from None
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(readers: dict[Connection, int], processes: list[Any], timeout: float | None) -> list[Any]:
    deadline = None if timeout is None else time.monotonic() + timeout
    results: list[Any] = [None] * len(processes)
    waiting = dict(readers)
    while waiting:
        ready = wait(list(waiting), None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} did not finish within {timeout:g} s")
        for reader in ready:
            assert isinstance(reader, Connection)
            rank = waiting.pop(reader)
            succeeded, value, details = _receive(reader, processes[rank])
            if not succeeded:
                raise _cause(RankFailed(rank, value, details), waiting, processes)
            results[rank] = value
    return results


def _receive(reader: Connection, process: Any) -> tuple[bool, Any, str]:
    try:
        return reader.recv()
    except EOFError:
        process.join()
        return False, None, exit_in_words(process.exitcode)


def _require_room(ranks: int) -> None:
    """Refuse more ranks than there are files or memory for; no signal would end their start."""
    memory, files = (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )
    most = min(memory // _OF_RANK, files if files != resource.RLIM_INFINITY else sys.maxsize)
    if ranks > most:
        raise ConfigError(f"{ranks} ranks are more than this machine has files and memory for, {most}; start fewer")


def _cause(first: RankFailed, waiting: dict[Connection, int], processes: list[Any]) -> RankFailed:
    """The failure to report: a lost connection, a RuntimeError, is often but the echo of what another rank says."""
    if not isinstance(first.error, RuntimeError):
        return first
    began = time.monotonic()
    waiting = dict(waiting)
    while waiting:
        ready = wait(list(waiting), 0.1)
        ends = any(_ending(processes[rank].pid) for rank in waiting.values())
        if not ready and time.monotonic() > began + (_LONGEST_END if ends else _ECHO):
            break
        for reader in ready:
            assert isinstance(reader, Connection)
            rank = waiting.pop(reader)
            succeeded, value, details = _receive(reader, processes[rank])
            if not succeeded and not isinstance(value, RuntimeError):
                return RankFailed(rank, value, details)
    return first


def _ending(pid: int) -> bool:
    """True if a process has been killed or has left, though its last files may not be closed yet: on a busy machine that takes seconds."""
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended, or this is not Linux
        return False
    exiting = 4  # PF_EXITING
    return state in "ZX" or bool(int(numbers[5]) & exiting)


def exit_in_words(code: int) -> str:
    """The end of a process in words, by its exit code."""
    return f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"


def _rank(
    function: Callable[..., Any],
    arguments: tuple,
    rank: int,
    ranks: int,
    port: int,
    place: Callable[[int], Mapping[str, str]] | None,
    parent: int,
    writer: Connection,
    all_reported: Event,
) -> None:
    for number in _Passed.numbers:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _Passed.numbers)
    gc.freeze()  # a collection does not walk, and so copy, all that was imported before the fork
    die_with(parent)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        if place is not None:
            os.environ.update(place(rank))
        message = (True, function(*arguments), "")
    except BaseException as error:
        message = (False, error, traceback.format_exc())
    try:
        if not message[0]:
            pickle.loads(pickle.dumps(message[1]))  # some exceptions can be sent, and not be received
        writer.send(message)
    except Exception as error:
        message = (False, None, message[2] or f"what it returned cannot be sent: {error}")
        writer.send(message)
    sys.stdout.flush()
    sys.stderr.flush()
    if message[0]:
        _leave_group(rank, all_reported)
    # Those that Python would end on its way out, such as asynchronous checkpoints' workers.
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0 if message[0] else 1)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies (Linux).

    Args:
        parent: the parent's number, which it may have had no time to lose.
    """
    if sys.platform == "linux":
        die_with_parent = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(die_with_parent, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _leave_group(rank: int, all_reported: Event) -> None:
    with suppress(Exception):
        import torch.distributed as dist

        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            dist.destroy_process_group()
            if rank == 0:  # it serves the store, in which others may still look for who is in their next group
                all_reported.wait()
            del store
