"""Links between nodes: IPv6, nodes that vanish without a word, ranks that hold their interpreter or are stopped."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from axonn_plugins.cluster.launch import launch
from axonn_plugins.pccl import backend, interfaces, rendezvous
from axonn_plugins.pccl.answering import Answering
from axonn_plugins.pccl.build import compiler, load
from axonn_plugins.pccl.interfaces import addresses_of
from axonn_plugins.pccl.links import Fabric, Member
from axonn_plugins.pccl.rendezvous import Members, Roll
from tests.matrix import thorough
from tests.pccl import namespaces
from tests.pccl.handshake import Secret, dial, introduce
from tests.pccl.stress import join
from tests.pccl.test_links import far, linked

HELD = float(os.environ.get("AXONN_TEST_HELD", 4))
"""Seconds for which a rank holds its interpreter's lock; more than 20 by hand, once the limit of a handshake."""
SILENCE = 2.0
on_nodes = pytest.mark.skipif(namespaces.lacking() is not None, reason=f"no nodes can be had: {namespaces.lacking()}")


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Before ranks are forked, whose time is limited."""
    load()


def test_addresses_of_interfaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert addresses_of(["lo"], 3)[0] == "127.0.0.1" and addresses_of(None, 0) == ["127.0.0.1"]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert addresses_of(None, 0) == ["127.0.0.1"]
    monkeypatch.setenv("MASTER_ADDR", "nobody.invalid")
    with pytest.raises(ValueError, match="MASTER_ADDR 'nobody.invalid' has no route from here .*; name interfaces"):
        addresses_of(None, 0)
    with pytest.raises(ValueError, match="interface 'none0' is not one of this node's; choose from"):
        addresses_of(["none0"], 0)
    known = tmp_path / "if_inet6"
    monkeypatch.setattr(interfaces, "_IPV6", known)
    # Digits, number, prefix, scope, flags, name: of its own network, temporary, doubled, deprecated, and the one.
    lines = ["fe80" + 27 * "0" + "1 02 40 20 80 lo"]
    for flags, end in (("01", "a"), ("48", "b"), ("20", "c"), ("80", "d")):
        known.write_text("\n".join(lines) + "\n")
        best = addresses_of(["lo"], 0)
        assert best == ["127.0.0.1", {1: "fe80::1%lo", 2: "fd00::a"}.get(len(lines), "fd00::a")]
        lines.append(f"fd{29 * '0'}{end} 02 40 00 {flags} lo")
    known.write_text("\n".join(lines) + "\n")
    assert addresses_of(["lo"], 0) == ["127.0.0.1", "fd00::d"]
    known.write_text(lines[-1].replace(" lo", " other"))
    assert addresses_of(["lo"], 0) == ["127.0.0.1"]


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_links_over_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "::1")
    one = Fabric(load().Core())
    both = Fabric(load().Core(), ["lo"])
    assert [host for host, _ in one.member.addresses] == ["::1"]
    assert [host for host, _ in both.member.addresses] == ["127.0.0.1", "::1"]
    secret = Secret(os.urandom(32))
    group = one.join(secret.secret, 10)
    assert both.join(secret.secret, 10) == group
    one.connect(group, far(both.member), 5)  # which has an IPv4 address first
    both.connect(group, far(one.member), 5)
    assert linked(one, both.member) and linked(both, one.member)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    other = Fabric(load().Core())
    with pytest.raises(RuntimeError, match="one speaks IPv4 only and the other IPv6"):
        other.connect(other.join(secret.secret, 5), far(one.member), 5)
    with dial(both.member, place=1) as connection:
        assert connection.family == socket.AF_INET6 and introduce(connection, secret, both.member) == 0


def test_a_rank_that_no_other_node_reaches_is_named() -> None:
    def roll(*members: tuple[str, str]) -> Roll:
        records = [Member(16 * "00", node, ((host, 5),), "name").record() for node, host in members]
        return Roll(Members(records), [], [node for node, _ in members], [])

    here, there = ("a boot net:[1]", "127.0.1.1"), ("b other net:[2]", "10.0.0.2")
    with pytest.raises(ValueError, match="rank 4 would listen at 127.0.1.1, where no other node reaches it; name"):
        rendezvous.reachable(roll(there, here), [3, 4])
    rendezvous.reachable(roll(here, ("c boot net:[1]", "::1")), [0, 1])  # one network, by two names


def _holds_its_interpreter(held: float) -> float:
    """Rank 1 holds its lock while rank 0 links with it; how long rank 0 took to."""
    rank, _ = join(timeout=60 + held)
    fabric = backend.fabric_of(backend.options_of_world())
    asked = backend.planner()
    store: Any = dist.distributed_c10d._get_default_store()
    store.set(f"linked{rank}", "")
    if rank == 1:
        ctypes.PyDLL(None).usleep(int(held * 1e6))  # as a call into C that forgets to let it go
        taken = 0.0
    else:
        time.sleep(held / 4)
        began = time.monotonic()
        fabric.connect(asked.group, asked.members[1], 60)
        taken = time.monotonic() - began
    data = torch.full((100_000,), float(rank + 1))
    dist.all_reduce(data)
    assert data.eq(3).all()
    dist.destroy_process_group()
    return taken


def test_a_rank_that_holds_its_interpreter_is_linked_with() -> None:
    taken = launch(_holds_its_interpreter, 2, HELD)[0]
    assert taken < HELD / 2, taken


def _told(call: Callable[..., object], *arguments: object) -> tuple[str, float]:
    began = time.monotonic()
    try:
        call(*arguments)
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return "no error", time.monotonic() - began


def _node_vanishes(when: str) -> tuple[str, float]:
    """The last rank's node vanishes; what the others are told, and after how many seconds."""
    os.environ.update(AXONN_PCCL_ALGORITHM="ring", AXONN_PCCL_SILENCE=str(SILENCE))
    rank, size = join(timeout=100)
    last = size - 1
    assert [host for host, _ in backend.planner().members[rank].addresses] == [f"fd77::{rank + 1}"]
    if when == "receiving":
        data = torch.arange(50_000.0) + rank
        dist.all_reduce(data)
        assert torch.equal(data, size * torch.arange(50_000.0) + sum(range(size)))
        _is_stopped(rank, last)
    if when == "sending":  # the last rank has sent nobody anything
        dist.broadcast(torch.ones(5), 0)
    store: Any = dist.distributed_c10d._get_default_store()
    store.set(f"ready{rank}", "")
    store.wait([f"ready{other}" for other in range(size)])
    time.sleep(0.3)  # for the store's answer to everybody
    if rank == last:
        namespaces.vanish()
        return "", 0.0
    time.sleep(0.7)
    if when == "sending":
        return _told(dist.broadcast, torch.ones(20_000_000), 0)
    return _told(dist.all_reduce, torch.ones(5))


def _is_stopped(rank: int, which: int) -> None:
    """A process that is stopped for long takes no bytes, but its node answers: it is waited for."""
    store: Any = dist.distributed_c10d._get_default_store()
    if rank == which:
        store.set("process", str(os.getpid()))
    process = int(store.get("process"))
    data = torch.full((20_000_000,), float(rank))  # more than the kernels hold
    if rank == 0:
        os.kill(process, signal.SIGSTOP)
        threading.Timer(3 * SILENCE, os.kill, (process, signal.SIGCONT)).start()
    dist.broadcast(data, 0)
    assert not data.any()


@on_nodes
@pytest.mark.parametrize("when", ["before links", thorough("receiving"), "sending"])
def test_a_node_that_vanishes_is_named_by_all_others(when: str) -> None:
    with namespaces.nodes(3) as place:
        told = launch(_node_vanishes, 3, when, place=place)
    for text, seconds in told[:2]:
        if when == "sending" and text == "no error":  # has done its part
            continue
        assert "rank 2" in text and seconds < 3 * SILENCE + 5, told
        assert "does not answer" in text or "has not answered" in text or "cannot be reached" in text, told
    assert any("rank 2" in text for text, _ in told), told


PRELOADED = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/prctl.h>

int prctl(int option, ...) {
  va_list given;
  va_start(given, option);
  unsigned long values[4];
  for (int i = 0; i < 4; ++i) values[i] = va_arg(given, unsigned long);
  va_end(given);
  if (option == PR_SET_PTRACER) {
    fprintf(stderr, "opened to %ld\\n", (long)values[0]);
    return 0;
  }
  int (*real)(int, ...) = (int (*)(int, ...))dlsym(RTLD_NEXT, "prctl");
  return real(option, values[0], values[1], values[2], values[3]);
}
"""

LINKS = """
import os, sys, torch, torch.distributed as dist
from axonn_plugins.cluster.launch import launch
from axonn_plugins.pccl import Options, register
from axonn_plugins.pccl.build import load

load()

def ranks(asked):
    register()
    dist.init_process_group("pccl", pg_options=Options("ring", read_memory=asked))
    data = torch.arange(100_000.0)
    dist.all_reduce(data)
    assert torch.equal(data, 3 * torch.arange(100_000.0))
    return os.getppid()

print(launch(ranks, 3, False))
print("now asked", file=sys.stderr, flush=True)
print(launch(ranks, 3, True))
"""


def test_memory_is_opened_where_asked_and_to_no_more_than_the_ranks_have_in_common(tmp_path: Path) -> None:
    source, library = tmp_path / "prctl.c", tmp_path / "prctl.so"
    source.write_text(PRELOADED)
    subprocess.run([compiler(), "-x", "c", "-shared", "-fPIC", source, "-ldl", "-o", library], check=True)
    variables = os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", LINKS], env=variables, capture_output=True, text=True, check=True)
    (launcher,) = {parent for line in run.stdout.splitlines() for parent in eval(line)}
    before, after = run.stderr.split("now asked\n")
    assert "opened to" not in before, run.stderr
    assert [line for line in after.splitlines() if line.startswith("opened to")] == 3 * [f"opened to {launcher}"]


def test_a_secret_is_taken_out_of_the_store_when_all_have_read_it() -> None:
    whole = dist.HashStore()
    asked = Answering(whole, 5.0)
    members = [backend._of_this_time(asked, 3) for _ in range(3)]
    first = rendezvous.secret_of(members[0], 0, range(3))
    # A group of the same name may be made again before the last member of this one is done.
    again = backend._of_this_time(asked, 3)
    assert rendezvous.secret_of(again, 0, range(3)) != first
    for rank in range(3):
        assert members[rank].check(["secret"])
        assert rank == 0 or rendezvous.secret_of(members[rank], rank, range(3)) == first
        rendezvous.tell(members[rank], rank, None, "here", "alike")
    rendezvous.roll_of(members[0], 0, range(3))
    assert not members[0].check(["secret"]) and again.check(["secret"])
