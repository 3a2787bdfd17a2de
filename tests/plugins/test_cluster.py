"""The emulated cluster: its links are as slow as asked, and nothing of it is left however it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from axonn_plugins.cli import main
from axonn_plugins.cluster import Cluster, address, lacking, processes, units
from axonn_plugins.cluster.cli import command_apart
from axonn_plugins.cluster.launch import RankFailed
from axonn_plugins.config import ConfigError

needs_cluster = pytest.mark.skipif(lacking() is not None, reason=str(lacking()))
MBIT = 10**6 / 8


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def left_over(name: str) -> list:
    return [switch for switch in processes.running() if switch.name == name]


@pytest.fixture
def name() -> Iterator[str]:
    chosen = f"test-{os.getpid()}"
    yield chosen
    for switch in left_over(chosen):
        processes.end([*processes.inside(switch), switch.pid])


@pytest.mark.parametrize(
    ("text", "expected"), [("0us", 0), ("100us", 100_000), ("0.5ms", 500_000), ("1s", 10**9), ("0.0015ms", 1500)]
)
def test_latencies(text: str, expected: int) -> None:
    assert units.nanoseconds(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [(None, 0), ("10kbit", 10**4), ("500Mbit", 5 * 10**8), ("2.5Gbit", 25 * 10**8)]
)
def test_bandwidths(text: str | None, expected: int) -> None:
    assert units.bits_per_second(text) == expected


@pytest.mark.parametrize("text", ["1", "ms", "1 ms", "-1ms", "1MS", "1e3us", "11s", "", ".5ms", "1ns"])
def test_wrong_latencies(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a time of at most 10s; write a number and us, ms or s"):
        units.nanoseconds(text)


@pytest.mark.parametrize("text", ["500", "500mbit", "500MB", "0Mbit", "1kbit", "500Gbit", "Mbit", "5 Gbit"])
def test_wrong_bandwidths(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a bandwidth from 10kbit to 400Gbit; write a number and kbit"):
        units.bits_per_second(text)


def test_quantities_are_shown_as_they_are_written() -> None:
    assert units.shown(500_000, 5 * 10**8) == "latency 500us, bandwidth 500Mbit"
    assert units.shown(2 * 10**9, 0) == "latency 2s, unlimited bandwidth"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"nodes": 0}, "nodes = 0 is not an integer from 1 to 64"),
        ({"nodes": 65}, "nodes = 65 is not"),
        ({"nodes": 2, "name": "a/b"}, "name = 'a/b' is not a name"),
        ({"nodes": 2, "latency": 5}, "latency = 5 is not a time"),
    ],
)
def test_wrong_arguments(arguments: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Cluster(**arguments)


@pytest.mark.parametrize(
    ("patched", "words"),
    [
        (("os.geteuid", lambda: 1000), "needs root .* run it with sudo"),
        (
            ("os.access", lambda *_: False),
            "/dev/net/tun, which an emulated cluster needs, is not here; run modprobe tun",
        ),
        (("shutil.which", lambda _: None), "needs a C compiler .* run apt install gcc"),
    ],
)
def test_what_is_lacking_is_said_before_anything_is_made(
    patched: tuple, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for found in (("os.geteuid", lambda: 0), ("os.access", lambda *_: True), patched):
        monkeypatch.setattr(*found)
    monkeypatch.setenv("AXONN_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=words), Cluster(nodes=2):
        pass
    assert not list(tmp_path.iterdir())


def ranks_and_links() -> dict:
    """Where this rank is; from rank 0 (node 0) the fastest of 20 round trips to node 1, and a transfer's bytes a second."""
    dist.init_process_group("gloo")
    everyone = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(everyone)
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR")
    found: dict = {"variables": [os.environ[variable] for variable in names], "sum": everyone.item()}
    port, size = 4321, 12 << 20
    if dist.get_rank() == 2:
        with socket.create_server((address(1), port)) as server:
            dist.barrier()
            peer, _ = server.accept()
            for _ in range(20):
                peer.sendall(peer.recv(1))
            received = 0
            while received < size:
                received += len(peer.recv(1 << 20))
            peer.sendall(b"!")
    else:
        dist.barrier()
    if dist.get_rank() == 0:
        with socket.create_connection((address(1), port)) as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips = []
            for _ in range(20):
                began = time.perf_counter()
                peer.sendall(b"?")
                peer.recv(1)
                trips.append(time.perf_counter() - began)
            began = time.perf_counter()
            peer.sendall(bytes(size))
            peer.recv(1)
            found |= {"trip": min(trips), "rate": size / (time.perf_counter() - began)}
    dist.barrier()
    return found


def fails() -> None:
    raise ValueError("on purpose")


@needs_cluster
def test_ranks_links_and_counters() -> None:
    with Cluster(nodes=3, latency="2ms", bandwidth="200Mbit") as cluster, Cluster(nodes=2) as other:
        assert {cluster.name, other.name} <= {switch.name for switch in processes.running()}
        results = cluster.launch(ranks_and_links, 2)
        for rank, found in enumerate(results):
            local, node = str(rank % 2), str(rank // 2)
            assert found["variables"] == [str(rank), local, "2", node, "6", address(0)]
            assert found["sum"] == 15
        # Two hops of 2 ms; a busy machine makes it slower, nothing makes it faster.
        assert results[0]["trip"] >= 0.004
        # Headers take 0.7 %.
        assert 0.5 * 200 * MBIT < results[0]["rate"] < 1.02 * 200 * MBIT
        assert until(
            lambda: sum(sent for sent, _ in cluster.bytes()) == sum(received for _, received in cluster.bytes())
        )
        sent, received = zip(*cluster.bytes(), strict=True)
        assert sent[0] > 12 << 20 and received[1] > 12 << 20
        assert sent[2] < 1 << 20
        assert all(traffic == (0, 0) for traffic in other.bytes())
    assert not left_over(cluster.name) and not left_over(other.name)


@needs_cluster
def test_jitter_spreads_round_trips() -> None:
    """Every packet comes, in order; the switch says how far latencies differ."""
    with Cluster(nodes=2, latency="2ms", jitter=0.5) as cluster:
        assert cluster.switch.jitter == 500
        assert cluster.launch(_sum, 1) == [1.0, 1.0]


def _sum() -> float:
    dist.init_process_group("gloo")
    everyone = torch.full((100_000,), float(dist.get_rank()))
    dist.all_reduce(everyone)
    return everyone.mean().item()


def test_wrong_jitter() -> None:
    with pytest.raises(ConfigError, match="jitter = 2 is not a share"):
        Cluster(nodes=2, jitter=2)


@needs_cluster
def test_one_node_does_not_go_through_the_switch_and_a_failure_leaves_nothing(name: str) -> None:
    with pytest.raises(RankFailed, match="on purpose"), Cluster(nodes=1, bandwidth="10kbit", name=name) as cluster:
        assert len(cluster.launch(ranks_and_world, 2)) == 2
        assert cluster.bytes() == [(0, 0)]
        with pytest.raises(ConfigError, match=f'a cluster named "{name}" is up'), Cluster(nodes=1, name=name):
            pass
        with pytest.raises(ConfigError, match="ranks_per_node = 0 is not"):
            cluster.launch(fails, 0)
        cluster.launch(fails, 2)
    assert not left_over(name)
    with pytest.raises(RuntimeError, match="not up"):
        cluster.launch(fails, 1)


def ranks_and_world() -> int:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(100_000))
    return dist.get_world_size()


OWNER = """
import subprocess, sys, time
from axonn_plugins.cluster import Cluster
def rank(script):
    subprocess.Popen([sys.executable, "-c", script])
    sys.stdout.write("started\\n")
    sys.stdout.flush()
    time.sleep(100)
with Cluster(2, name=sys.argv[1]) as cluster:
    cluster.launch(rank, 1, "import time; time.sleep(100)")
"""


@needs_cluster
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_owner_ends(number: int, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert owner.stdout is not None
    assert [owner.stdout.readline() for _ in range(2)] == [b"started\n"] * 2
    (switch,) = left_over(name)
    inside = processes.inside(switch)
    assert len(inside) == 4
    owner.send_signal(number)
    owner.wait(20)
    owner.stdout.close()
    assert until(lambda: not left_over(name))
    if number == signal.SIGKILL:
        # What a rank had started outlives it, until the next cluster is made or taken down.
        assert set(processes.strays()) & set(inside)
        assert main(["cluster", "down", "--name", name]) == 0
        assert "left over in a cluster that is gone" in capsys.readouterr().out
    assert until(lambda: not any(processes.alive(pid) for pid in inside))


@needs_cluster
def test_the_commands(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    def axonn(*words: str) -> tuple[int, str]:
        """In a fork of this process, which has imported it."""
        with tempfile.TemporaryFile("w+") as file:
            if not (child := os.fork()):
                try:
                    for descriptor in (1, 2):
                        os.dup2(file.fileno(), descriptor)
                    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
                    code = main(["cluster", *words])
                    sys.stdout.flush()
                    os._exit(code)
                finally:
                    os._exit(1)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            file.seek(0)
            return code, file.read()

    named = ("--name", name)
    assert axonn("exec", *named, "0", "true")[1].startswith(f'axonn: error: no cluster named "{name}" is up')
    assert axonn("up", "--nodes", "2", "--latency", "1ms", *named)[0] == 0
    assert axonn("up", "--nodes", "2", *named)[1].startswith(f'axonn: error: a cluster named "{name}" is up')
    code, text = axonn("status")
    assert code == 0 and f'cluster "{name}": 2 nodes, latency 1ms, unlimited bandwidth' in text
    code, text = axonn("exec", *named, "1", "sh", "-c", "echo $GLOO_SOCKET_IFNAME; cat /proc/net/dev; exit 3")
    assert code == 3 and text.startswith("net0\n") and "net0:" in text and "eth0:" not in text
    assert "node 2 is not in cluster" in axonn("exec", *named, "2", "true")[1]
    assert "no-such-command cannot be run" in axonn("exec", *named, "0", "no-such-command")[1]
    run = ("run", *named, "--ranks-per-node", "2", "sh", "-c")
    code, text = axonn(*run, "echo $RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE")
    assert code == 0 and sorted(text.splitlines()) == ["0 0 0 4", "1 1 0 4", "2 0 1 4", "3 1 1 4"]
    code, text = axonn(*run, "[ $RANK != 3 ] || exit 7; sleep 100")
    assert code == 7 and text == "axonn: rank 3 on node 1 ended with exit code 7\n"
    (switch,) = left_over(name)
    assert not processes.inside(switch)
    command = [sys.executable, "-m", "axonn_plugins.cli", "cluster", "exec", *named, "0", "sleep", "100"]
    with subprocess.Popen(command) as sleeper:
        assert until(lambda: processes.inside(switch) == [sleeper.pid])
        assert axonn("down", *named) == (0, f'cluster "{name}" is down, and with it 1 process that ran there\n')
    assert axonn("down", *named)[0] == 2 and not left_over(name)


@pytest.mark.parametrize(
    ("words", "positionals", "options"),
    [
        (["0", "sh", "-c", "--name"], 1, 1),
        (["--name", "a", "0", "true"], 1, 3),
        (["0", "--name=a", "true", "--name", "b"], 1, 2),
        (["--ranks-per-node", "2", "--", "python"], 0, 2),
        (["--ranks-per-node", "2", "python", "-m", "x"], 0, 2),
        (["-1", "true"], 1, 1),
    ],
)
def test_a_command_keeps_its_own_options(words: list[str], positionals: int, options: int) -> None:
    assert command_apart(words, positionals) == (words[:options], words[options:])
