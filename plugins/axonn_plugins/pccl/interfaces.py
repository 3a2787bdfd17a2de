"""Which network interface a process uses, with which addresses, and which node it is on."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915
_TEMPORARY, _FAILED, _DEPRECATED, _TENTATIVE = 0x01, 0x08, 0x20, 0x40
"""Flags of the kernel's for an IPv6 address (linux/if_addr.h)."""
_IPV6 = Path("/proc/net/if_inet6")


def addresses_of(interfaces: Sequence[str] | None, local_rank: int) -> list[str]:
    """The addresses to listen at and to send from: an IPv4 and an IPv6 one, or either; IPv4 first.

    Args:
        interfaces: names, of which process i of a node takes number i modulo their count; None: ``GLOO_SOCKET_IFNAME``
            if that is set, else the interface whose route leads to ``MASTER_ADDR``, else loopback.
        local_rank: the process' number on its node.

    Raises:
        ValueError: there is no such interface, or it has no address.
    """
    named = interfaces or [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if named:
        return _addresses(named[local_rank % len(named)])
    master = os.environ.get("MASTER_ADDR")
    return _towards(master) if master else ["127.0.0.1"]


def _towards(master: str) -> list[str]:
    """The addresses of this node's from which one speaks to the master, at each address that its name stands for."""
    found: dict[int, str] = {}
    why: OSError | None = None
    try:
        places = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        places, why = [], error
    for family, _, _, _, place in places:
        if family not in (socket.AF_INET, socket.AF_INET6) or family in found:
            continue
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(place)  # sends nothing: a datagram's connection is only a route
            except OSError as error:
                why = error
                continue
            found[family] = _with_zone(probe.getsockname())
    if not found:
        raise ValueError(f"MASTER_ADDR {master!r} has no route from here ({why}); name interfaces instead")
    return [found[family] for family in (socket.AF_INET, socket.AF_INET6) if family in found]


def _with_zone(name: tuple[str, int] | tuple[str, int, int, int]) -> str:
    host = name[0].partition("%")[0]
    return f"{host}%{socket.if_indextoname(name[3])}" if len(name) == 4 and name[3] else host


def _addresses(name: str) -> list[str]:
    known = sorted(name for _, name in socket.if_nameindex())
    if name not in known:
        raise ValueError(f"interface {name!r} is not one of this node's; choose from {', '.join(known)}")
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        found.append(socket.inet_ntoa(answer[20:24]))
    six = _six(name)
    if six:
        found.append(six)
    if not found:
        raise ValueError(f"interface {name!r} has no IPv4 or IPv6 address; choose another of {', '.join(known)}")
    return found


def _six(name: str) -> str | None:
    """The IPv6 address of an interface: one that holds beyond its network if there is one, and one that stays."""
    best: tuple[bool, bool, bool, str] | None = None
    for line in _IPV6.read_text().splitlines() if _IPV6.exists() else []:
        digits, _, _, _, flags, interface = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(digits))
        state = int(flags, 16)
        if interface != name or state & (_TENTATIVE | _FAILED):
            continue
        rank = (address.is_link_local, bool(state & _DEPRECATED), bool(state & _TEMPORARY), str(address))
        best = min(best, rank) if best else rank
    if best is None:
        return None
    return f"{best[3]}%{name}" if best[0] else best[3]


def node_name() -> str:
    """The same for processes that share a kernel and a network, and for no others."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return f"{socket.gethostname()} {boot.read().strip()} {os.readlink('/proc/self/ns/net')}"
