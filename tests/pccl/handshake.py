"""The handshake of links once more, in Python: what csrc/doors.hpp and csrc/dial.cpp are held against."""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import secrets
import socket
import struct
from dataclasses import dataclass

from axonn_plugins.pccl.links import Member

MAGIC = b"AXPCCL01"
HELLO = struct.Struct("<8s8s16s32s")  # magic, group, who calls, nonce
ANSWER = struct.Struct("<32s32s")  # nonce, proof
PROOF = struct.Struct("<32sQ8s")  # proof, address of a token, the token
READ, SHARE, SHOW = 1, 2, 4
"""Ways in which the other side will read."""


@dataclass(frozen=True)
class Secret:
    """A secret that members of a group know."""

    secret: bytes

    @property
    def key(self) -> bytes:
        """The group's name."""
        return hashlib.sha256(b"group" + self.secret).digest()[:8]

    def proof(self, side: bytes, *parts: bytes) -> bytes:
        """That one knows it."""
        return hmac.digest(self.secret, side + b"".join(parts), "sha256")


def dial(member: Member, near: bool = False, place: int = 0) -> socket.socket:
    """A connection that says nothing yet."""
    if near:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(10)
        connection.connect(f"\0{member.unix}")
        return connection
    connection = socket.create_connection(member.addresses[place], timeout=10)
    connection.settimeout(10)
    return connection


def hello(secret: Secret, identity: bytes) -> bytes:
    """The first message."""
    return HELLO.pack(MAGIC, secret.key, identity, secrets.token_bytes(32))


def introduce(
    connection: socket.socket,
    secret: Secret,
    member: Member,
    memory: tuple[int, ...] = (),
    identity: bytes | None = None,
    lies: bool = False,
) -> int:
    """The caller's side; the ways in which the other will read.

    Args:
        connection: to the member.
        secret: the group's.
        member: who is called.
        memory: descriptors to hand over.
        identity: the caller's; None: anybody's.
        lies: whether the token lies elsewhere than is said.
    """
    mine = identity or secrets.token_bytes(16)
    first = hello(secret, mine)
    connection.sendall(first)
    nonce, proof = ANSWER.unpack(exactly(connection, ANSWER.size))
    said = (secret.key, mine, bytes.fromhex(member.identity), first[32:], nonce)
    assert hmac.compare_digest(proof, secret.proof(b"receiver", *said))
    token = ctypes.create_string_buffer(secrets.token_bytes(8), 8)
    last = PROOF.pack(secret.proof(b"sender", *said), ctypes.addressof(token), bytes(8) if lies else token.raw)
    if memory:
        socket.send_fds(connection, [last], list(memory))
    else:
        connection.sendall(last)
    return exactly(connection, 1)[0]


def exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes."""
    got = b""
    while len(got) < size:
        part = connection.recv(size - len(got))
        if not part:
            raise EOFError("the connection ended")
        got += part
    return got


def ended(connection: socket.socket) -> bool:
    """True if the other side hangs up without a word."""
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True
