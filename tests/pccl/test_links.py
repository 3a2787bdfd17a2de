"""The handshake of links, and what a member that misbehaves can do."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from axonn_plugins.launch import launch
from axonn_plugins.pccl import links
from axonn_plugins.pccl.build import load
from axonn_plugins.pccl.interfaces import address_of
from axonn_plugins.pccl.links import Fabric, Group, LinkError, Member
from tests.pccl.stress import join


class Core:
    """In the engine's place: remembers its links."""

    def __init__(self) -> None:
        self.outgoing: dict[int, int] = {}
        self.incoming: list[tuple[int, int]] = []
        self.memories: list[int] = []
        self.sockets: list[socket.socket] = []

    def linked(self, peer: int) -> bool:
        return peer in self.outgoing

    def set_board(self, memory: int) -> None:
        self.board = self._kept(memory)

    def add_outgoing(self, peer: int, handle: int, process: int, memory: int, boarded: bool) -> None:
        self.memories.append(self._kept(memory))
        self.boarded = boarded
        self.outgoing[peer] = process
        self.sockets.append(socket.socket(fileno=handle))

    def add_incoming(self, peer: int, handle: int, process: int, memory: int, board: int) -> None:
        self.memories.append(self._kept(memory))
        self.seen = self._kept(board)
        self.incoming.append((peer, process))
        self.sockets.append(socket.socket(fileno=handle))

    def _kept(self, memory: int) -> int:
        if memory < 0:
            return -1
        found = os.fstat(memory).st_ino
        os.close(memory)
        return found


@pytest.fixture()
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Fabric, Fabric, Group]]:
    """Two processes' fabrics and a group that both have joined."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    one, other = Fabric(Core()), Fabric(Core())
    group = Group(secrets.token_bytes(32))
    one.join(group)
    other.join(group)
    yield one, other, group


def far(member: Member) -> Member:
    """As seen from another node."""
    return Member(member.identity, "another node", member.host, member.port, member.unix)


@pytest.mark.parametrize("near", [True, False])
def test_members_meet(pair: tuple[Fabric, Fabric, Group], near: bool) -> None:
    one, other, group = pair
    one.connect(group, other.member if near else far(other.member), 5)
    one.connect(group, other.member, 5)  # is there already
    assert len(other.core.incoming) == 1 and len(one.core.outgoing) == 1
    process = other.core.incoming[0][1]
    assert process in ((os.getpid(), 0) if near else (0,))
    assert list(one.core.outgoing.values()) == [1 if process else 0]
    assert one.core.memories == other.core.memories  # the same
    assert (one.core.memories[0] >= 0) == one.core.boarded == (other.core.seen == one.core.board) == near


@pytest.mark.parametrize("near", [True, False])
def test_a_member_that_has_ended_is_not_waited_for(pair: tuple[Fabric, Fabric, Group], near: bool) -> None:
    one, other, group = pair
    gone = replace(other.member, port=1, unix="nobody")
    with pytest.raises(LinkError, match="port 1 cannot be reached from 127.0.0.1"):
        one.connect(group, gone if near else far(gone), 10_000)


def test_who_does_not_know_the_secret_is_turned_away(pair: tuple[Fabric, Fabric, Group]) -> None:
    one, other, group = pair
    with pytest.raises(LinkError, match="did not answer"):  # of a group that the other has not joined
        one.connect(Group(secrets.token_bytes(32)), other.member, 5)

    class Guess(Group):
        """Knows the group's name, but not its secret."""

        key = group.key

    with pytest.raises(LinkError, match="does not know the job's secret"):
        one.connect(Guess(bytes(32)), other.member, 5)
    assert not other.core.incoming and not one.core.outgoing


def dial(fabric: Fabric) -> socket.socket:
    connection = socket.create_connection((fabric.member.host, fabric.member.port), timeout=10)
    connection.settimeout(10)
    return connection


def ended(connection: socket.socket) -> bool:
    """Whether the other side hangs up without a word."""
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


def test_wrong_hellos_and_proofs_end_the_connection(pair: tuple[Fabric, Fabric, Group]) -> None:
    _, other, group = pair
    rubbish = dial(other)
    rubbish.sendall(secrets.token_bytes(links._HELLO.size))
    assert ended(rubbish)
    cut = dial(other)
    cut.sendall(b"AXPC")
    cut.shutdown(socket.SHUT_WR)
    assert ended(cut)
    hello = links._HELLO.pack(links._MAGIC, group.key, secrets.token_bytes(16), secrets.token_bytes(32))
    guess = dial(other)
    guess.sendall(hello)
    links._exactly(guess, links._ANSWER.size)
    guess.sendall(secrets.token_bytes(links._PROOF.size))
    assert ended(guess)
    assert not other.core.incoming


def test_what_was_overheard_is_of_no_use(pair: tuple[Fabric, Fabric, Group]) -> None:
    _, other, group = pair
    identity, nonce = secrets.token_bytes(16), secrets.token_bytes(32)
    hello = links._HELLO.pack(links._MAGIC, group.key, identity, nonce)

    def meet(proof: bytes | None) -> tuple[bytes, bytes]:
        """A handshake with this last message, or a right one; the last message and the answer."""
        connection = dial(other)
        connection.sendall(hello)
        theirs, _ = links._ANSWER.unpack(links._exactly(connection, links._ANSWER.size))
        right = group.proof(b"sender", group.key, identity, other.identity, nonce, theirs)
        last = proof or links._PROOF.pack(right, 0, bytes(8))
        connection.sendall(last)
        try:
            return last, connection.recv(1)
        except ConnectionResetError:
            return last, b""

    overheard, answer = meet(None)
    assert answer == b"\0" and len(other.core.incoming) == 1
    assert meet(overheard)[1] == b"" and len(other.core.incoming) == 1


def test_silence_does_not_keep_others_waiting(
    pair: tuple[Fabric, Fabric, Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, group = pair
    monkeypatch.setattr(links, "_MOST_STRANGERS", 20)
    silent = [dial(other) for _ in range(60)]
    one.connect(group, far(other.member), 5)
    assert len(other.core.incoming) == 1
    assert ended(silent[0])  # beyond some number, those that have been silent longest have to go


def test_memory_that_may_not_be_read_is_streamed(
    pair: tuple[Fabric, Fabric, Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, group = pair
    monkeypatch.setattr(links, "_read", lambda process, address, size: None)
    one.connect(group, other.member, 5)
    assert other.core.incoming[0][1] == 0 and list(one.core.outgoing.values()) == [0]


def test_the_listener_is_bound_to_the_interface_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "axonn_plugins.pccl.interfaces._address", {"first": "127.0.0.2", "second": "127.0.0.3"}.__getitem__
    )
    for local_rank, address in ((0, "127.0.0.2"), (1, "127.0.0.3"), (2, "127.0.0.2")):
        fabric = Fabric(Core(), ["first", "second"], local_rank)
        assert fabric._tcp.getsockname()[0] == address == fabric.member.host
        # Whoever else has this port at 127.0.0.1, a client that draws it as its own among them, may take the call; not this fabric.
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", fabric.member.port), timeout=5).close()
        fabric._tcp.setblocking(False)
        with pytest.raises(BlockingIOError):
            fabric._tcp.accept()


def test_interfaces_are_named_or_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert address_of(["lo"], 3) == address_of(None, 0) == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert address_of(None, 0) == "127.0.0.1"
    with pytest.raises(ValueError, match="interface 'none0' is not one of this node's; choose from"):
        address_of(["none0"], 0)


HEADER = struct.Struct("<IBBBBQQQQIIII")
MAGIC = 0x4C434350


def rubbish(kind: str, key: int) -> bytes:
    """What a member sends where a frame should be."""
    if kind == "rubbish":
        return bytes(range(56))
    # all_reduce of 5 float32 (sum), call 1
    right = HEADER.pack(MAGIC, 1, 2, 1, 0, key, 1, 2**41 if kind == "too long" else 12, 5, 0, 0, 0, 0)
    return right[:30] if kind == "cut off" else right


def _misbehaves(kind: str) -> str:
    """Rank 1 sends what is no frame on a link of its own to rank 0, which is in an all-reduce."""
    rank, _ = join(timeout=20)
    from axonn_plugins.pccl import backend

    fabric = backend._fabric(os.getpid(), None)
    group = next(iter(fabric._groups.values()))
    store: Any = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("zero", fabric.member.record())
        try:
            dist.all_reduce(torch.ones(5))
        except RuntimeError as error:
            text = str(error)
        else:
            text = "no error"
        store.set("over", "yes")
        return text
    member = Member.read(store.get("zero"))
    connection = fabric._reach(member, 10)
    fabric._introduce(connection, group, member)
    time.sleep(0.3)
    connection.sendall(rubbish(kind, int.from_bytes(group.key, "little")))
    # Not closed yet: what the other has sent is unread here, and would take these bytes with it.
    connection.shutdown(socket.SHUT_WR)
    with suppress(dist.DistNetworkError):  # rank 0, which keeps the store, may be gone by then
        store.get("over")
    connection.close()
    return ""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("rubbish", "does not begin a frame"),
        ("too long", "its frame is too long"),
        ("cut off", "in the middle of a frame"),
    ],
)
def test_a_member_that_sends_no_frames_is_named(kind: str, said: str) -> None:
    load()
    text = launch(_misbehaves, 2, kind, timeout=60)[0]
    assert "rank 0: all_reduce of 5 float32 (sum), call 1 of its group, needs rank 1" in text and said in text, text


def _links_again() -> None:
    """A link that is lost while nothing is under way is made anew for the next group."""
    rank, size = join(timeout=20)
    from axonn_plugins.pccl import backend

    fabric = backend._fabric(os.getpid(), None)
    dist.all_reduce(torch.ones(5))
    store: Any = dist.distributed_c10d._get_default_store()
    store.set(f"reduced{rank}", "")
    store.get(f"reduced{1 - rank}")
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as link:
            if link.family == socket.AF_UNIX and link.getpeername()[:12] == b"\0axonn-pccl-":
                link.shutdown(socket.SHUT_RDWR)
    while any(fabric.core.linked(number) for number in fabric._numbers.values()):
        time.sleep(0.01)
    store.set(f"lost{rank}", "")
    store.get(f"lost{1 - rank}")
    time.sleep(0.5)  # for the other's end to be seen here
    again = torch.ones(5)
    dist.all_reduce(again, group=dist.new_group())
    assert again.tolist() == [size] * 5
    dist.destroy_process_group()


def test_a_lost_link_is_made_again() -> None:
    load()
    launch(_links_again, 2, timeout=60)
