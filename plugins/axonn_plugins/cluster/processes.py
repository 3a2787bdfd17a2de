"""Which clusters run, and which processes are in them; read from /proc, so that nothing recorded can be out of date."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from axonn_plugins.cluster.switch import Switch, read

TOKEN = "AXONN_CLUSTER"
RUN = "AXONN_CLUSTER_RUN"
_GRACE_SECONDS = 2.0


def running() -> list[Switch]:
    """All clusters of this machine, by name."""
    return sorted((found for pid in _pids() if (found := read(pid))), key=lambda switch: switch.name)


def inside(switch: Switch, run: str | None = None) -> list[int]:
    """Processes in the nodes of a cluster, this one left out; with `run`, those that have it as their `RUN`."""
    spaces = {_identity(path) for path in switch.namespaces()} - {None}
    found = [pid for pid in _pids() if pid != os.getpid() and _identity(Path(f"/proc/{pid}/ns/net")) in spaces]
    return found if run is None else [pid for pid in found if _variable(pid, RUN) == run]


def strays() -> list[int]:
    """Processes that were started in a cluster that is no more, and still are where no network reaches them."""
    tokens = {switch.token for switch in running()}
    home = _identity(Path("/proc/self/ns/net"))
    found = []
    for pid in _pids():
        token = _variable(pid, TOKEN)
        if token and token not in tokens and _identity(Path(f"/proc/{pid}/ns/net")) not in (home, None):
            found.append(pid)
    return found


def end(pids: Iterable[int]) -> None:
    """End processes: politely, and after two seconds without asking."""
    left = set(pids)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + _GRACE_SECONDS
        while (left := {pid for pid in left if alive(pid)}) and time.monotonic() < deadline:
            time.sleep(0.01)


def _pids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _variable(pid: int, name: str) -> str | None:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = f"{name}=".encode()
    return next((entry[len(prefix) :].decode() for entry in environment if entry.startswith(prefix)), None)


def alive(pid: int) -> bool:
    """True if a process runs; one that has ended and is not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
