"""Which network interface a process uses, and which node it is on."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence

_SIOCGIFADDR = 0x8915


def address_of(interfaces: Sequence[str] | None, local_rank: int) -> str:
    """The IPv4 address to listen at and to send from.

    Args:
        interfaces: names, of which process i of a node takes number i modulo their count; None: ``GLOO_SOCKET_IFNAME``
            if that is set, else the interface whose route leads to ``MASTER_ADDR``, else loopback.
        local_rank: the process' number on its node.

    Raises:
        ValueError: there is no such interface, or it has no IPv4 address.
    """
    named = interfaces or [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if named:
        return _address(named[local_rank % len(named)])
    master = os.environ.get("MASTER_ADDR")
    if not master:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 9))  # sends nothing: a datagram's connection is only a route
        except OSError as error:
            raise ValueError(
                f"MASTER_ADDR {master!r} has no route from here ({error}); name interfaces instead"
            ) from error
        return str(probe.getsockname()[0])


def _address(name: str) -> str:
    known = sorted(name for _, name in socket.if_nameindex())
    if name not in known:
        raise ValueError(f"interface {name!r} is not one of this node's; choose from {', '.join(known)}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            raise ValueError(f"interface {name!r} has no IPv4 address; choose another of {', '.join(known)}") from error
    return socket.inet_ntoa(found[20:24])


def node_name() -> str:
    """The same for processes that share a kernel and a network, and for no others."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return f"{socket.gethostname()} {boot.read().strip()} {os.readlink('/proc/self/ns/net')}"
