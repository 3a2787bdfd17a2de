"""Authenticated links between processes, made when they are first needed by the engine's own thread (csrc/doors.hpp).

A link goes one way: whoever has something to send connects. Between nodes a link is a TCP connection. Within one it is a unix
socket and nameless memory that the sender hands through it: bytes go through that memory. A large message the receiver
reads from the sender's own memory (process_vm_readv), where the kernel allows it, or, where several of the node are sent
the same, from the sender's board, which it has handed over too. Both sides prove knowledge of the group's secret, which
its rank 0 hands out through the store.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from axonn_plugins.pccl.build import load
from axonn_plugins.pccl.interfaces import addresses_of, node_name
from axonn_plugins.pccl.options import SILENCE


class LinkError(RuntimeError):
    """A peer cannot be reached, or is not who it should be."""


class Gone(LinkError):
    """A peer listens no longer, or its node does not answer: it has ended."""


@dataclass(frozen=True)
class Member:
    """Where one rank of a group is to be found.

    Attributes:
        identity: of the process, 16 bytes in hexadecimal digits.
        node: its name.
        addresses: where it listens, a host and a port each.
        unix: the name at which it listens within the node.
    """

    identity: str
    node: str
    addresses: tuple[tuple[str, int], ...]
    unix: str

    def record(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def read(record: bytes | str) -> Member:
        """From the store."""
        found = json.loads(record)
        return Member(**found | {"addresses": tuple((host, port) for host, port in found["addresses"])})


@dataclass(frozen=True)
class Group:
    """A group that a process knows the secret of.

    Attributes:
        number: its name in frames, made of the secret.
    """

    number: int


class Fabric:
    """A process' links.

    Args:
        core: the engine.
        interfaces: names of the network interfaces to use, of which this process takes one; None: the one that leads to
            the master.
        local_rank: number of the process on its node, which picks the interface (as the paper maps GCDs to NICs).
        silence: seconds after which a node that does not answer is given up.
        read_memory: whether peers of the node may read this process' memory even where Yama forbids it by default.

    Raises:
        ValueError: there is no such interface.
        OSError: it cannot be listened there.
    """

    def __init__(
        self,
        core: Any,
        interfaces: Sequence[str] | None = None,
        local_rank: int = 0,
        silence: float = SILENCE,
        read_memory: bool = False,
    ) -> None:
        self.core = core
        hosts = addresses_of(interfaces, local_rank)
        try:
            self._doors = load().Doors(core, hosts, silence, read_memory)
        except RuntimeError as error:
            raise OSError(f"pccl: at {' and '.join(hosts)} {error}") from error
        addresses = tuple((host, port) for host, port in self._doors.addresses)
        self.member = Member(self._doors.identity.hex(), node_name(), addresses, self._doors.name)

    def join(self, secret: bytes, timeout: float) -> Group:
        """Accept links of a group from now on, whose handshakes may take `timeout` seconds."""
        return Group(self._doors.join(secret, timeout))

    def number(self, identity: str) -> int:
        """The engine's number for a peer."""
        return int(self._doors.number(bytes.fromhex(identity)))

    def connect(self, group: Group, member: Member, timeout: float) -> None:
        """Make the link to a member, if it is not there.

        Raises:
            LinkError: it cannot be reached in `timeout` seconds, or does not know the secret, or the group is out of order.
        """
        failed = self._doors.connect(group.number, self._peer(member), timeout)
        if failed is not None:
            why, gone = failed
            raise (Gone if gone else LinkError)(why)

    def gone(self, member: Member, moment: float = 0.2) -> bool:
        """True if a member's process has ended, as far as can be told in a moment."""
        return bool(self._doors.gone(self._peer(member), moment))

    def _peer(self, member: Member) -> Any:
        near = member.node == self.member.node
        return load().Peer(bytes.fromhex(member.identity), near, member.unix, list(member.addresses))
