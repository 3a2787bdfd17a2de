"""Systems in processes of their own, so that one that fails, crashes or hangs on a rank ends on all of them, and the others go on.

Each rank is an agent that touches no GPU. For every system it starts a process, and tells the other agents how that ended; a store is all
that they share.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from axonn_plugins.cluster.launch import die_with, exit_in_words
from axonn_plugins.observe import progress
from axonn_recipes.gpu_test.scale import Found, Scale
from axonn_recipes.gpu_test.systems import SYSTEMS

_POLL, _GRACE, _MARGIN = 0.05, 5.0, 60.0
"""Seconds between looks at the others, of a rank whose neighbour has failed to say what it knows, and of agents beyond a system's."""

_OWN, _OF_OTHERS, _STOPPED, _NONE = range(4)
"""Kinds of a rank's end, the likeliest cause of the others' first: a failure of its own, a RuntimeError, as a lost connection is, none."""
_Said = tuple[int, str]


@dataclass(frozen=True)
class Outcome:
    """The end of a system: its results, or the reason that there are none.

    Attributes:
        name: of the system.
        seconds: that it took, from the start of its processes.
        found: what it reported; None where it failed.
        errors: by rank, the first to fail first.
    """

    name: str
    seconds: float
    found: Found | None
    errors: dict[int, str]


class Agent:
    """A rank's part of a run.

    Args:
        scale: the run's.
        patience: seconds that a system may take.
    """

    def __init__(self, scale: Scale, patience: float) -> None:
        self.scale, self.patience = scale, patience
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        # Processes of a system start anew where they use a GPU, which a fork must not have touched.
        self._context: Any = multiprocessing.get_context("spawn" if scale.device == "cuda" else "fork")
        if not served and self.rank == 0:
            self._serve()
        self.store = _store(self.ranks, False)

    def _serve(self) -> None:
        """Have a process of its own serve the store: a fork beside its thread may find the resolver locked for good."""
        reader, writer = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_serve, args=(self.ranks, writer, os.getpid()), daemon=True)
        with _unheard():
            process.start()
        writer.close()
        if (error := reader.recv()) is not None:
            raise RuntimeError(error)

    def run(self, number: int, name: str) -> Outcome:
        """Run a system; every agent calls it with the same arguments. Rank 0 has what was found, the others only their own error."""
        begun = time.monotonic()
        store = dist.PrefixStore(f"system{number}", self.store)
        with tempfile.TemporaryDirectory(prefix="axonn-gpu-") as folder:
            log = Path(folder) / "output.txt"
            reader, writer = self._context.Pipe(duplex=False)
            arguments = number, name, self.scale, self.patience, str(log), writer, os.getpid()
            process = self._context.Process(target=_system, args=arguments)
            with _unheard():
                process.start()
            writer.close()
            try:
                found, said = self._heard(store, reader, process, log)
                store.set(f"said {self.rank}", json.dumps(said))
                errors = self._all_said(store) if self.rank == 0 else {}
                if self.rank == 0:
                    store.set("over", "")
                store.wait(["over"], timedelta(seconds=self.patience + _MARGIN))
            finally:
                process.kill()
                process.join()
        return Outcome(name, time.monotonic() - begun, None if errors else found, errors)

    def _heard(self, store: Any, reader: Connection, process: Any, log: Path) -> tuple[Found | None, _Said]:
        """Wait for the report of this rank's process, or the reason that there is none."""
        deadline = time.monotonic() + self.patience
        stopped = False
        while time.monotonic() < deadline:
            if reader.poll(_POLL):
                try:
                    found, how, error = reader.recv()
                except EOFError:
                    process.join()
                    found, how, error = None, _OWN, f"{exit_in_words(process.exitcode)}\n{_tail(log)}".strip()
                if how != _NONE:
                    store.compare_set("failed", "", str(self.rank))
                return found, (how, error)
            if not stopped and store.check(["failed"]):
                stopped, deadline = True, time.monotonic() + _GRACE
        if not stopped:
            store.compare_set("failed", "", str(self.rank))
            return None, (_OWN, f"it did not end within {self.patience:g} s\n{_tail(log)}".strip())
        return None, (_STOPPED, "")

    def _all_said(self, store: Any) -> dict[int, str]:
        """Errors by rank, the first to fail first."""
        keys = [f"said {rank}" for rank in range(self.ranks)]
        store.wait(keys, timedelta(seconds=self.patience + _MARGIN))
        said: dict[int, _Said] = {rank: json.loads(store.get(key)) for rank, key in enumerate(keys)}
        failed = {rank: how for rank, (how, _) in said.items() if how != _NONE}
        if not failed:
            return {}
        noticed = int(store.get("failed"))
        # A rank that died may be heard of after those that lost their connection to it.
        first = min(failed, key=lambda rank: (failed[rank], rank != noticed))
        stopped = f"it was stopped, since rank {first} had failed"
        return {rank: said[rank][1] or stopped for rank in sorted(failed, key=lambda rank: rank != first)}


@contextmanager
def _unheard() -> Iterator[None]:
    """A process that is started within hears no Ctrl-C; its agent does, and ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _store(ranks: int, serves: bool) -> dist.TCPStore:
    """A store of all ranks at MASTER_ADDR and MASTER_PORT, where torchrun has one already."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, ranks, serves, wait_for_workers=False)


def _serve(ranks: int, writer: Connection, parent: int) -> None:
    die_with(parent)
    try:
        served = _store(ranks, True)
    except RuntimeError as error:
        writer.send(str(error))
        return
    writer.send(None)
    while served:
        time.sleep(3600)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:]) if log.exists() else ""


def _system(number: int, name: str, scale: Scale, patience: float, log: str, writer: Connection, parent: int) -> None:
    """In a process of its own: run a system, tell the agent, and wait for the end, since others may still need this rank."""
    die_with(parent)
    with open(log, "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    try:
        writer.send((_run(number, name, scale, patience), _NONE, ""))
    except BaseException as error:
        writer.send((None, _OF_OTHERS if isinstance(error, RuntimeError) else _OWN, traceback.format_exc()))
    while True:
        time.sleep(patience)


def _run(number: int, name: str, scale: Scale, patience: float) -> Found:
    cuda = scale.device == "cuda"
    os.environ["DS_ACCELERATOR"] = scale.device
    warnings.filterwarnings("ignore", category=FutureWarning)
    options: dict[str, Any] = {}
    if cuda:
        if torch.cuda.device_count() == 1:  # each rank is shown its own
            os.environ["LOCAL_RANK"] = "0"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        options["device_id"] = torch.device("cuda", torch.cuda.current_device())  # as DeepSpeed does
    else:
        torch.set_num_threads(1)
    store = dist.PrefixStore(f"group{number}", _store(scale.ranks, False))
    rank, limit = int(os.environ["RANK"]), timedelta(seconds=patience)
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=rank, world_size=scale.ranks, timeout=limit, **options
    )
    found: Found = import_module(SYSTEMS[name].module).run(scale)
    found.device = torch.cuda.get_device_name() if cuda else None
    dist.barrier()
    return found


def run(names: Sequence[str], scale: Scale, patience: float, say: Callable[[Outcome], None]) -> None:
    """Run systems one after the other; every rank calls it.

    Args:
        names: of `SYSTEMS`.
        scale: the run's.
        patience: seconds that each may take.
        say: called on rank 0 with each outcome.
    """
    agent = Agent(scale, patience)
    for number, name in enumerate(names):
        progress.say(f"running {name}, {number + 1} of {len(names)}")
        outcome = agent.run(number, name)
        if agent.rank == 0:
            say(outcome)
