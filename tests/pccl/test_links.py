"""The handshake of links, and what a member that misbehaves can do."""

from __future__ import annotations

import fcntl
import os
import resource
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from axonn_plugins.cluster.launch import launch
from axonn_plugins.pccl.build import load
from axonn_plugins.pccl.links import Fabric, Gone, Group, LinkError, Member
from tests.pccl.handshake import (
    ANSWER,
    HELLO,
    MAGIC,
    PROOF,
    READ,
    SHARE,
    SHOW,
    Secret,
    dial,
    ended,
    exactly,
    hello,
    introduce,
)
from tests.pccl.stress import join


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Before ranks are forked, whose time is limited."""
    load()


Pair = tuple[Fabric, Fabric, Secret, Group]


@pytest.fixture()
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Two processes' fabrics, and a group that both have joined."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    one, other = Fabric(load().Core()), Fabric(load().Core())
    secret = Secret(secrets.token_bytes(32))
    group = one.join(secret.secret, 30)
    assert group == other.join(secret.secret, 30)
    assert group.number.to_bytes(8, "little") == secret.key
    yield one, other, secret, group


def far(member: Member) -> Member:
    """As seen from another node."""
    return replace(member, node="another node")


def linked(fabric: Fabric, member: Member) -> bool:
    return bool(fabric.core.linked(fabric.number(member.identity)))


def watched_twice() -> set[str]:
    """Sockets of which two of this process' epolls tell."""
    sockets, watched = set(), []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target.startswith("socket:"):
                sockets.add(target[8:-1])
            elif "eventpoll" in target:
                lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
                nodes = (line.split("ino:")[1].split()[0] for line in lines if line.startswith("tfd"))
                watched += [str(int(node, 16)) for node in nodes]
    return {node for node in sockets if watched.count(node) > 1}


@pytest.mark.parametrize("near", [True, False])
def test_a_link_wakes_the_engine_alone(pair: Pair, near: bool) -> None:
    """Who let it in would wake with every message, and until that is read."""
    one, other, _, group = pair
    one.connect(group, other.member if near else far(other.member), 5)
    until = time.monotonic() + 5
    while watched_twice() and time.monotonic() < until:
        time.sleep(0.01)
    assert not watched_twice()


@pytest.mark.parametrize("near", [True, False])
def test_members_meet(pair: Pair, near: bool) -> None:
    one, other, _, group = pair
    member = other.member if near else far(other.member)
    assert not linked(one, member)
    one.connect(group, member, 5)
    one.connect(group, member, 5)  # is there already
    assert linked(one, member)


@pytest.mark.parametrize("near", [True, False])
def test_ways_are_agreed(pair: Pair, near: bool) -> None:
    _, other, secret, _ = pair
    memory = [links_memory(4096 + 8192 + 2**18), links_memory(2**20)]
    for handed, ways in (((), 0), (memory[:1], SHARE), (memory, SHARE | SHOW)):
        if handed and not near:
            continue
        with dial(other.member, near) as connection:
            assert introduce(connection, secret, other.member, tuple(handed)) & ~READ == ways
    with dial(other.member, near) as connection:  # what is not where it is said to be cannot be read
        assert not introduce(connection, secret, other.member, lies=True) & READ
    with dial(other.member, near) as connection:
        assert near or not introduce(connection, secret, other.member) & READ
    for descriptor in memory:
        os.close(descriptor)


def links_memory(size: int) -> int:
    """Sealed memory, as a caller hands it over."""
    made = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(made, size)
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return made


@pytest.mark.parametrize("near", [True, False])
def test_a_member_that_has_ended_is_not_waited_for(pair: Pair, near: bool) -> None:
    one, other, _, group = pair
    gone = replace(other.member, addresses=(("127.0.0.1", 1),), unix="nobody")
    gone = gone if near else far(gone)
    with pytest.raises(Gone, match="port 1 cannot be reached from 127.0.0.1: Connection refused"):
        one.connect(group, gone, 10_000)
    assert one.gone(gone) and not one.gone(other.member) and not one.gone(far(other.member))


def test_who_does_not_know_the_secret_is_turned_away(pair: Pair) -> None:
    one, other, secret, group = pair
    with pytest.raises(
        LinkError, match="did not answer: the connection ended"
    ):  # of a group that the other has not joined
        one.connect(one.join(secrets.token_bytes(32), 5), other.member, 5)

    def guess() -> None:
        connection, _ = listener.accept()
        exactly(connection, HELLO.size)
        connection.sendall(secrets.token_bytes(ANSWER.size))
        with connection:
            ended(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=guess, daemon=True).start()
        impostor = replace(far(other.member), addresses=(("127.0.0.1", listener.getsockname()[1]),))
        with pytest.raises(LinkError, match="does not know the job's secret"):
            one.connect(group, impostor, 5)
    assert not linked(one, other.member)


def test_wrong_hellos_and_proofs_end_the_connection(pair: Pair) -> None:
    _, other, secret, _ = pair
    with dial(other.member) as rubbish:
        rubbish.sendall(secrets.token_bytes(HELLO.size))
        assert ended(rubbish)
    with dial(other.member) as web:
        web.sendall(b"GET / HTTP/1.1\r\nHost: here\r\nUser-Agent: a port scanner that says a lot\r\n\r\n")
        assert ended(web)
    with dial(other.member) as cut:
        cut.sendall(MAGIC[:4])
        cut.shutdown(socket.SHUT_WR)
        assert ended(cut)
    with dial(other.member) as guess:
        guess.sendall(hello(secret, secrets.token_bytes(16)))
        exactly(guess, ANSWER.size)
        guess.sendall(secrets.token_bytes(PROOF.size))
        assert ended(guess)
    with dial(other.member, near=True) as many:  # more memory than is ever handed over
        many.sendall(hello(secret, secrets.token_bytes(16)))
        exactly(many, ANSWER.size)
        with suppress(OSError):
            socket.send_fds(many, [secrets.token_bytes(PROOF.size)], [many.fileno()] * 5)
        assert ended(many)


def test_what_was_overheard_is_of_no_use(pair: Pair) -> None:
    _, other, secret, _ = pair
    identity = secrets.token_bytes(16)
    first = hello(secret, identity)

    def meet(proof: bytes | None) -> tuple[bytes, bytes]:
        """A handshake with this last message, or a right one; the last message and the answer."""
        with dial(other.member) as connection:
            connection.sendall(first)
            theirs, _ = ANSWER.unpack(exactly(connection, ANSWER.size))
            said = (secret.key, identity, bytes.fromhex(other.member.identity), first[32:], theirs)
            last = proof or PROOF.pack(secret.proof(b"sender", *said), 0, bytes(8))
            connection.sendall(last)
            try:
                return last, connection.recv(1)
            except ConnectionResetError:
                return last, b""

    overheard, answer = meet(None)
    assert answer == b"\0"
    assert meet(overheard)[1] == b""


def test_silence_does_not_keep_others_waiting(pair: Pair) -> None:
    one, other, _, group = pair
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard), hard))
    silent = [dial(other.member) for _ in range(600)]
    began = time.monotonic()
    one.connect(group, far(other.member), 5)
    assert linked(one, other.member) and time.monotonic() - began < 5
    assert ended(silent[0])  # beyond some number, those that have been silent longest have to go
    for connection in silent:
        connection.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_mute_peer_is_waited_for_until_the_time_or_the_group_is_over(pair: Pair) -> None:
    one, other, _, group = pair
    with socket.create_server(("127.0.0.1", 0)) as mute:
        member = replace(far(other.member), addresses=(("127.0.0.1", mute.getsockname()[1]),))
        began = time.monotonic()
        with pytest.raises(LinkError, match="did not answer: it was silent until the time was over"):
            one.connect(group, member, 1)
        assert 1 <= time.monotonic() - began < 10
        one.core.add_group(group.number, [0, 1], [4, 5], 0, 100.0)
        threading.Timer(0.5, one.core.give_up, (group.number, "rank 5 has had enough")).start()
        began = time.monotonic()
        with pytest.raises(LinkError, match="rank 5 has had enough"):
            one.connect(group, member, 100)
        assert time.monotonic() - began < 50


@pytest.mark.parametrize("near", [True, False])
def test_nothing_is_left_of_fabrics_and_strangers(near: bool) -> None:
    import gc

    load()
    cores = [load().Core(), load().Core()]  # which stay as long as the process
    before = sorted(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        one, other = (Fabric(core) for core in cores)
        with dial(other.member, near) as connection:
            connection.sendall(b"AX")
        secret = secrets.token_bytes(32)
        group = one.join(secret, 5)
        other.join(secret, 5)
        if not near:
            with pytest.raises(LinkError):
                one.connect(group, replace(other.member, addresses=(("127.0.0.1", 1),), node="another"), 5)
        del one, other
        gc.collect()
    assert before == (sorted(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd")))


def test_the_listener_is_bound_to_the_interface_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"first": ["127.0.0.2"], "second": ["127.0.0.3"]}
    monkeypatch.setattr("axonn_plugins.pccl.interfaces._addresses", names.__getitem__)
    for local_rank, address in ((0, "127.0.0.2"), (1, "127.0.0.3"), (2, "127.0.0.2")):
        fabric = Fabric(load().Core(), ["first", "second"], local_rank)
        assert [host for host, _ in fabric.member.addresses] == [address]
        with suppress(OSError), dial(far(fabric.member)) as right:
            assert right.getpeername()[0] == address
        listening = Path("/proc/net/tcp").read_text()
        port = f"{fabric.member.addresses[0][1]:04X}"
        # Other processes may listen at the same port of other addresses.
        ours = {os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
        rows = [line.split() for line in listening.splitlines() if f":{port} " in line]
        bound = {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in ours}
        assert bound == {f"{socket.inet_aton(address)[::-1].hex().upper()}:{port}"}


HEADER = struct.Struct("<IBBBBQQQQIIII")
FRAME = 0x4C434350


def rubbish(kind: str, key: int) -> bytes:
    """Bytes that a member sends where a frame should be."""
    if kind == "rubbish":
        return bytes(range(56))
    # all_reduce of 5 float32 (sum), call 1
    right = HEADER.pack(FRAME, 1, 2, 1, 0, key, 1, 2**41 if kind == "too long" else 12, 5, 0, 0, 0, 0)
    return right[:30] if kind == "cut off" else right


def overheard() -> list[Secret]:
    """The secrets of the groups that this process makes from now on."""
    from axonn_plugins.pccl import rendezvous

    known: list[Secret] = []
    read = rendezvous.secret_of

    def keeps(*inputs: Any) -> bytes:
        known.append(Secret(read(*inputs)))
        return known[-1].secret

    rendezvous.secret_of = keeps
    return known


def _misbehaves(kind: str) -> str:
    """Rank 1 sends what is no frame on a link of its own to rank 0, which is in an all-reduce."""
    from axonn_plugins.pccl import backend

    known = overheard()
    rank, _ = join(timeout=20)
    fabric = backend.fabric_of(backend.options_of_world())
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
    connection = dial(member, near=True)
    introduce(connection, known[0], member, identity=bytes.fromhex(fabric.member.identity))
    time.sleep(0.3)
    connection.sendall(rubbish(kind, int.from_bytes(known[0].key, "little")))
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
    text = launch(_misbehaves, 2, kind)[0]
    assert "rank 0: all_reduce of 5 float32 (sum), call 1 of its group, needs rank 1" in text and said in text, text


def _links_again() -> None:
    """A link that is lost while nothing is under way is made anew for the next group."""
    rank, size = join(timeout=20)
    from axonn_plugins.pccl import backend

    fabric = backend.fabric_of(backend.options_of_world())
    dist.all_reduce(torch.ones(5))
    store: Any = dist.distributed_c10d._get_default_store()
    store.set(f"reduced{rank}", "")
    store.get(f"reduced{1 - rank}")
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as link:
            if link.family == socket.AF_UNIX and link.getpeername()[:12] == b"\0axonn-pccl-":
                link.shutdown(socket.SHUT_RDWR)
    while any(fabric.core.linked(number) for number in range(size)):
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
    launch(_links_again, 2)
