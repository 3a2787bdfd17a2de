"""The switch's process: what it needs, how it is compiled and started, and what can be read of it while it runs."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from axonn_plugins.caches import cache_folder
from axonn_plugins.cluster.units import MAX_NODES
from axonn_plugins.config import ConfigError

INTERFACE = "net0"
_PROGRAM = "axonn-switch"
_FLAGS = ("-O2",)
_COUNTERS_FD, _NAMESPACE_FD = 3, 100
_CLONE_NEWNET = 0x40000000


class Traffic(NamedTuple):
    """Bytes of IP packets that a node has sent to and received from other nodes."""

    sent: int
    received: int


@dataclass(frozen=True)
class Switch:
    """A running switch, and so a cluster.

    Attributes:
        name: the cluster's.
        nodes: how many.
        latency: one way, ns.
        bandwidth: bits a second of each node in each direction; 0 for no limit.
        owner: the process whose end is the cluster's end; 0 for none.
        pid: the switch's process.
        started: when that started, in the kernel's ticks; with `pid` this names it for ever.
        jitter: by how many thousandths of it a packet's latency differs at most.
    """

    name: str
    nodes: int
    latency: int
    bandwidth: int
    owner: int
    pid: int
    started: int
    jitter: int = 0

    @property
    def token(self) -> str:
        """The mark in the environment of processes in the cluster; no two switches have the same."""
        return f"{self.name}:{self.pid}:{self.started}"

    def namespaces(self) -> list[Path]:
        """The nodes' network namespaces, by node."""
        return [Path(f"/proc/{self.pid}/fd/{_NAMESPACE_FD + node}") for node in range(self.nodes)]

    def enter(self, node: int) -> None:
        """Move the calling thread, and what it starts from now on, into a node.

        Raises:
            ConfigError: it may not, or the cluster is down.
        """
        try:
            descriptor = os.open(self.namespaces()[node], os.O_RDONLY)
        except OSError as error:
            raise ConfigError(
                f'cluster "{self.name}" cannot be entered: {error.strerror}; is it up, and are you root?'
            ) from None
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(descriptor, _CLONE_NEWNET):
                raise ConfigError(
                    f"node {node} cannot be entered: {os.strerror(ctypes.get_errno())}; run as root, with CAP_SYS_ADMIN"
                )
        finally:
            os.close(descriptor)

    def counters(self) -> mmap.mmap:
        """The memory in which the switch counts; it can be read from within nodes too."""
        with open(f"/proc/{self.pid}/fd/{_COUNTERS_FD}", "rb") as shared:
            return mmap.mmap(shared.fileno(), 2 * 8 * MAX_NODES, access=mmap.ACCESS_READ)


def traffic(counters: mmap.mmap, nodes: int) -> list[Traffic]:
    """The bytes counted so far, by node."""
    values = struct.unpack(f"={2 * MAX_NODES}Q", counters[:])
    return [Traffic(values[node], values[MAX_NODES + node]) for node in range(nodes)]


def read(pid: int) -> Switch | None:
    """The switch whose process this is; None if it is another program's, or none."""
    try:
        if not os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith(f"{_PROGRAM}-"):
            return None
        _, name, *numbers = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        nodes, latency, bandwidth, owner, jitter = (int(number) for number in numbers)
        started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError):
        return None
    return Switch(name.decode(), nodes, latency, bandwidth, owner, pid, started, jitter)


def lacking() -> str | None:
    """A sentence on the first thing that this machine lacks to emulate a cluster, and its remedy; None if nothing."""
    if sys.platform != "linux":
        return "an emulated cluster is made of Linux's network namespaces; use a Linux machine"
    if os.geteuid() != 0:
        return "an emulated cluster needs root to make network namespaces; run it with sudo"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return (
            "/dev/net/tun, which an emulated cluster needs, is not here; run modprobe tun, "
            "or start the container with --device /dev/net/tun --cap-add NET_ADMIN,SYS_ADMIN"
        )
    if not _program().exists() and _compiler() is None:
        return "an emulated cluster needs a C compiler to build its switch; run apt install gcc libc6-dev"
    return None


def start(name: str, nodes: int, latency: int, bandwidth: int, owner: int, jitter: int = 0) -> subprocess.Popen:
    """Start a switch and wait until its nodes stand.

    Args:
        name: the cluster's.
        nodes: how many.
        latency: ns.
        bandwidth: bits a second, 0 for no limit.
        owner: the process it shall not outlive, which must be this one; 0 for none.
        jitter: thousandths of the latency by which a packet's may differ.

    Raises:
        ConfigError: something is lacking, the name is taken, or the kernel refused.
    """
    if problem := lacking():
        raise ConfigError(problem)
    command = [str(_compiled()), name, *map(str, (nodes, latency, bandwidth, owner, jitter))]
    # In a session of its own a terminal's Ctrl-C does not reach it before the ranks have ended.
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(
        command, stdin=nothing, stdout=subprocess.PIPE, stderr=nothing, start_new_session=True, text=True
    )
    try:
        assert process.stdout is not None
        with process.stdout as stdout:
            answer = stdout.readline().strip()
        if answer == "ready":
            return process
    except BaseException:
        process.kill()
        process.wait()
        raise
    process.wait()
    if answer == "taken":
        raise ConfigError(f'a cluster named "{name}" is up; take it down first, or choose another name')
    raise ConfigError(
        f"the emulated cluster was not made, {answer or 'its switch ended without a word'}; "
        "run as root on the machine itself, or in a container with --cap-add SYS_ADMIN,NET_ADMIN --device /dev/net/tun"
    )


def _source() -> bytes:
    return files("axonn_plugins.cluster").joinpath("switch.c").read_bytes()


def _program() -> Path:
    digest = hashlib.sha256(b"\0".join([_source(), *(flag.encode() for flag in _FLAGS)])).hexdigest()[:16]
    return cache_folder() / f"{_PROGRAM}-{digest}"


def _compiler() -> str | None:
    return next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


def _compiled() -> Path:
    """The program, compiled unless the cache has it; a half-written one is never seen."""
    program = _program()
    if program.exists():
        return program
    compiler = _compiler()
    assert compiler is not None
    try:
        program.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=program.parent)
    except OSError as error:
        raise ConfigError(
            f"the switch cannot be kept in {program.parent}: {error.strerror}; set AXONN_CACHE to a folder that "
            "can be written"
        ) from None
    os.close(descriptor)
    try:
        command = [compiler, *_FLAGS, "-x", "c", "-", "-o", name]
        built = subprocess.run(command, input=_source(), capture_output=True)
        if built.returncode:
            complaint = next(
                (line for line in built.stderr.decode().splitlines() if "error" in line), "no reason given"
            )
            raise ConfigError(
                f"{compiler} did not compile the cluster's switch ({complaint}); run apt install gcc libc6-dev"
            )
        os.chmod(name, 0o755)
        os.replace(name, program)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)
    return program
