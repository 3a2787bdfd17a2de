"""Nodes with nothing but IPv6: network namespaces on one bridge. They need root and `ip`."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

_CLONE_NEWNET = 0x40000000
INTERFACE = "eth0"


@cache
def lacking() -> str | None:
    """The first thing that such nodes need and this machine has not."""
    if os.geteuid() != 0:
        return "root"
    if shutil.which("ip") is None:
        return "ip"
    done = subprocess.run(["ip", "netns", "add", f"axonn{os.getpid()}"], capture_output=True, text=True)
    if done.returncode:
        return done.stderr.strip()
    _ip("netns", "del", f"axonn{os.getpid()}")
    return None


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def nodes(count: int) -> Iterator[Callable[[int], dict[str, str]]]:
    """The function by which `axonn_plugins.cluster.launch.launch` puts rank i on node i, which has the address fd77::(i + 1)."""
    mark = f"axonn{os.getpid()}"
    names = [f"{mark}-{node}" for node in range(count)]
    switch = f"{mark}-switch"
    try:
        for name in (switch, *names):
            _ip("netns", "add", name)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for node, name in enumerate(names):
            _ip("-n", switch, "link", "add", f"port{node}", "type", "veth", "peer", INTERFACE, "netns", name)
            _ip("-n", switch, "link", "set", f"port{node}", "master", "bridge", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "address", "del", "127.0.0.1/8", "dev", "lo")
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", name, "address", "add", f"fd77::{node + 1}/64", "dev", INTERFACE, "nodad")

        def place(rank: int) -> dict[str, str]:
            with open(f"/var/run/netns/{names[rank]}") as namespace:
                if ctypes.CDLL(None).setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(f"{names[rank]} cannot be entered")
            return {"LOCAL_RANK": "0", "MASTER_ADDR": "fd77::1", "GLOO_SOCKET_IFNAME": INTERFACE}

        yield place
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def vanish() -> None:
    """Have the node of this process take and give no packet any more, without a word to the others."""
    _ip("link", "set", INTERFACE, "down")
