"""Authenticated links between processes, made when they are first needed, and handed to the C++ engine.

A link goes one way: whoever has something to send connects, and the receiver's thread accepts at any time, whatever its
program is doing, so that no order of calls can lock. Between nodes a link is a TCP connection. Within one it is a unix
socket and nameless memory that the sender hands through it: bytes go through that memory. A large message the receiver
reads from the sender's own memory (process_vm_readv), where the kernel allows it, or, where several of the node are sent
the same, from the sender's board, which it has handed over too. Both sides prove knowledge of the group's secret, which
its rank 0 hands out through the store.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from axonn_plugins.pccl.interfaces import address_of, node_name

_MAGIC = b"AXPCCL01"
_HELLO = struct.Struct("<8s8s16s32s")  # magic, group, identity, nonce
_ANSWER = struct.Struct("<32s32s")  # nonce, proof
_PROOF = struct.Struct("<32sQ8s")  # proof, address of a token, the token
_READ, _SHARE, _SHOW = 1, 2, 4
"""The receiver reads the sender's memory; bytes go through the memory that was handed over; it has the sender's board."""
_SHARED = 4096 + 8192 + 2**18  # bytes: counts, answers, messages
_BOARD = 2**24  # bytes that processes of a node may read at a time; they take memory when they are first used
_PATIENCE = 20.0  # seconds for a handshake
_MOMENT = 0.2  # seconds for a connection
_MOST_STRANGERS = 512  # handshakes under way; beyond, the one that takes longest ends


class LinkError(RuntimeError):
    """A peer cannot be reached, or is not who it should be."""


class Gone(LinkError):
    """A peer listens no longer: it has ended."""


@dataclass(frozen=True)
class Member:
    """Where one rank of a group is to be found."""

    identity: str
    node: str
    host: str
    port: int
    unix: str

    def record(self) -> str:
        """For the store."""
        return json.dumps(self.__dict__)

    @staticmethod
    def read(record: bytes) -> Member:
        """From the store."""
        return Member(**json.loads(record))


@dataclass(frozen=True)
class Group:
    """What a process knows of a group: its secret, and a key made of it."""

    secret: bytes

    @property
    def key(self) -> bytes:
        """Names the group in frames; 8 bytes."""
        return hashlib.sha256(b"group" + self.secret).digest()[:8]

    def proof(self, side: bytes, *parts: bytes) -> bytes:
        """That one knows the secret, for this one conversation."""
        return hmac.digest(self.secret, side + b"".join(parts), "sha256")


class Fabric:
    """A process' links.

    Args:
        core: the engine.
        interfaces: names of the network interfaces to use, of which this process takes one; None: the one that leads to
            the master.
        local_rank: number of the process on its node, which picks the interface (as the paper maps GCDs to NICs).
    """

    def __init__(self, core: Any, interfaces: Sequence[str] | None = None, local_rank: int = 0) -> None:
        self.core = core
        self.identity = secrets.token_bytes(16)
        self._groups: dict[bytes, Group] = {}
        self._numbers: dict[bytes, int] = {}
        self._lock = threading.Lock()
        self._connecting: dict[int, threading.Lock] = {}
        self._strangers: dict[socket.socket, None] = {}
        self._board = _memory(_BOARD)
        if self._board >= 0:
            core.set_board(os.dup(self._board))
        host = address_of(interfaces, local_rank)
        self._tcp = socket.create_server((host, 0), backlog=1024)
        self._unix = socket.socket(socket.AF_UNIX)
        name = f"axonn-pccl-{self.identity.hex()}"
        self._unix.bind(f"\0{name}")
        self._unix.listen(1024)
        self.member = Member(self.identity.hex(), node_name(), host, self._tcp.getsockname()[1], name)
        for listener in (self._tcp, self._unix):
            # A forked child must not seem to listen in its parent's place.
            os.register_at_fork(after_in_child=listener.close)
            threading.Thread(target=self._accept, args=(listener,), name="pccl-accept", daemon=True).start()

    def join(self, group: Group) -> int:
        """Accept links of a group from now on; the group's number in frames."""
        with self._lock:
            self._groups[group.key] = group
        return int.from_bytes(group.key, "little")

    def number(self, identity: str) -> int:
        """The engine's number for a peer."""
        with self._lock:
            return self._numbers.setdefault(bytes.fromhex(identity), len(self._numbers))

    def connect(self, group: Group, member: Member, timeout: float) -> None:
        """Make the link to a member, if it is not there.

        Raises:
            LinkError: it cannot be reached in `timeout` seconds, or does not know the secret.
        """
        number = self.number(member.identity)
        with self._lock:
            connecting = self._connecting.setdefault(number, threading.Lock())
        with connecting:
            if self.core.linked(number):
                return
            connection = self._reach(member, timeout)
            memory = _memory(_SHARED) if connection.family == socket.AF_UNIX else -1
            try:
                handed = [made for made in (memory, self._board) if memory >= 0 and made >= 0]
                ways = self._introduce(connection, group, member, handed, timeout)
                shared = os.dup(memory) if ways & _SHARE else -1
                self.core.add_outgoing(number, connection.detach(), ways & _READ, shared, bool(ways & _SHOW))
            except LinkError:
                connection.close()
                raise
            except (OSError, EOFError, RuntimeError) as error:
                connection.close()
                raise LinkError(f"the process at {member.host} port {member.port} did not answer: {error}") from error
            finally:
                if memory >= 0:
                    os.close(memory)

    def gone(self, member: Member) -> bool:
        """Whether a member's process has ended, as far as can be told in a moment."""
        try:
            self._reach(member, _MOMENT).close()
        except LinkError as error:
            return isinstance(error, Gone)
        return False

    def _reach(self, member: Member, timeout: float) -> socket.socket:
        near = member.node == self.member.node
        deadline = time.monotonic() + timeout
        while True:
            connection = socket.socket(socket.AF_UNIX if near else socket.AF_INET)
            connection.settimeout(max(0.1, min(_PATIENCE, deadline - time.monotonic())))
            try:
                if near:
                    connection.connect(f"\0{member.unix}")
                else:
                    connection.bind((self.member.host, 0))
                    connection.connect((member.host, member.port))
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection
            except OSError as error:
                connection.close()
                # Members listen before they are known: one that refuses has ended.
                refused = isinstance(error, ConnectionRefusedError)
                if refused or time.monotonic() + 0.05 > deadline:
                    raise (Gone if refused else LinkError)(
                        f"the process at {member.host} port {member.port} cannot be reached from {self.member.host}: {error}"
                    ) from error
                time.sleep(0.05)

    def _introduce(
        self,
        connection: socket.socket,
        group: Group,
        member: Member,
        memory: Sequence[int] = (),
        timeout: float = _PATIENCE,
    ) -> int:
        """The connecting side of the handshake, which hands `memory` over; the ways in which the other side will read."""
        mine, theirs = secrets.token_bytes(32), bytes.fromhex(member.identity)
        connection.settimeout(min(_PATIENCE, timeout))
        connection.sendall(_HELLO.pack(_MAGIC, group.key, self.identity, mine))
        nonce, proof = _ANSWER.unpack(_exactly(connection, _ANSWER.size))
        said = (group.key, self.identity, theirs, mine, nonce)
        if not hmac.compare_digest(proof, group.proof(b"receiver", *said)):
            raise LinkError(f"the process at {member.host} port {member.port} does not know the job's secret")
        token = ctypes.create_string_buffer(secrets.token_bytes(8), 8)
        _let_read()
        last = _PROOF.pack(group.proof(b"sender", *said), ctypes.addressof(token), token.raw)
        if memory:
            last = last[socket.send_fds(connection, [last], memory) :]
        connection.sendall(last)
        return _exactly(connection, 1)[0]

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                time.sleep(0.05)  # there may be no file descriptor to be had just now
                continue
            # Whoever connects and says nothing must not keep the others waiting.
            with self._lock:
                self._strangers[connection] = None
                if len(self._strangers) > _MOST_STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._meet, args=(connection,), daemon=True).start()

    def _meet(self, connection: socket.socket) -> None:
        """The accepting side of the handshake; strangers are turned away without a word."""
        handed: list[int] = []
        try:
            with connection:
                connection.settimeout(_PATIENCE)
                magic, key, identity, theirs = _HELLO.unpack(_exactly(connection, _HELLO.size))
                with self._lock:
                    group = self._groups.get(key)
                if magic != _MAGIC or group is None:
                    return
                mine = secrets.token_bytes(32)
                said = (key, identity, self.identity, theirs, mine)
                connection.sendall(_ANSWER.pack(mine, group.proof(b"receiver", *said)))
                proof, address, token = _PROOF.unpack(_exactly(connection, _PROOF.size, handed))
                if not hmac.compare_digest(proof, group.proof(b"sender", *said)):
                    return
                process = _process_of(connection)
                readable = process > 0 and _read(process, address, len(token)) == token
                ways = _READ * readable + _SHARE * (len(handed) > 0) + _SHOW * (len(handed) > 1)
                board = handed.pop() if len(handed) > 1 else -1
                # The engine listens before the other side may send.
                self.core.add_incoming(
                    self.number(identity.hex()),
                    os.dup(connection.fileno()),
                    process if readable else 0,
                    handed.pop() if handed else -1,
                    board,
                )
                connection.sendall(bytes([ways]))
        except (OSError, EOFError, struct.error, RuntimeError):
            pass
        finally:
            for descriptor in handed:
                os.close(descriptor)
            with self._lock:
                self._strangers.pop(connection, None)


def _exactly(connection: socket.socket, size: int, handed: list[int] | None = None) -> bytes:
    """So many bytes; into `handed` go descriptors that come with them through a unix socket."""
    got = b""
    while len(got) < size:
        if handed is None or connection.family != socket.AF_UNIX:
            part = connection.recv(size - len(got))
        else:
            part, descriptors, _, _ = socket.recv_fds(connection, size - len(got), 2, socket.MSG_CMSG_CLOEXEC)
            handed += descriptors
        if not part:
            raise EOFError("the connection ended")
        got += part
    return got


def _memory(size: int) -> int:
    """Nameless memory of this user's that cannot change its size, or -1 where there is none to be had."""
    made = -1
    try:
        made = os.memfd_create("axonn-pccl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(made, 0o600)
        os.ftruncate(made, size)
        fcntl.fcntl(made, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        if made >= 0:
            os.close(made)
        return -1
    return made


def _process_of(connection: socket.socket) -> int:
    """The process at the other end of a unix socket, as the kernel knows it; 0 for TCP."""
    if connection.family != socket.AF_UNIX:
        return 0
    process, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(process)


_libc = ctypes.CDLL(None, use_errno=True)


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def _read(process: int, address: int, size: int) -> bytes | None:
    """Another process' memory, or None where that is not allowed."""
    here = ctypes.create_string_buffer(size)
    local = _Vector(ctypes.addressof(here), size)
    remote = _Vector(address, size)
    read = _libc.process_vm_readv
    read.restype = ctypes.c_ssize_t
    arguments = (ctypes.c_ulong(1), ctypes.byref(remote), ctypes.c_ulong(1), ctypes.c_ulong(0))
    got = read(ctypes.c_int(process), ctypes.byref(local), *arguments)
    return here.raw if got == size else None


def _let_read() -> None:
    """Where Yama keeps processes from each other's memory, let those of this user read this one's."""
    pr_set_ptracer, anyone = 0x59616D61, ctypes.c_ulong(-1)
    _libc.prctl(pr_set_ptracer, anyone, 0, 0, 0)
