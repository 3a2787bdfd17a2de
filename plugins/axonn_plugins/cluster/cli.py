"""The commands ``axonn cluster up|exec|run|status|down``."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from tyro import conf

from axonn_plugins.cli.options import read
from axonn_plugins.cluster import environment, place_rank, processes, sweep, traffic
from axonn_plugins.cluster.launch import RankFailed, launch
from axonn_plugins.cluster.switch import Switch, lacking, start
from axonn_plugins.cluster.units import bits_per_second, cluster_name, nanoseconds, node_count, shown
from axonn_plugins.config import ConfigError

DEFAULT_NAME = "axonn"


@dataclass(frozen=True, kw_only=True)
class Named:
    """A cluster.

    Attributes:
        name: the cluster's.
    """

    name: str = DEFAULT_NAME


@dataclass(frozen=True, kw_only=True)
class Up(Named):
    """Make a cluster that stays until `down`.

    Attributes:
        nodes: 1 to 64.
        latency: from node to node, one way: 100us, 0.5ms.
        bandwidth: of a node, in each direction: 500Mbit, 10Gbit; else there is no limit.
    """

    nodes: int
    latency: str = "0us"
    bandwidth: str | None = None


@dataclass(frozen=True, kw_only=True)
class Exec(Named):
    """Run a command on one node; the command stands behind the options.

    Attributes:
        node: the first is 0.
    """

    node: Annotated[conf.Positional[int], conf.arg(metavar="NODE")]


@dataclass(frozen=True, kw_only=True)
class Run(Named):
    """Run a command as ranks on all nodes, with torchrun's variables set; the command stands behind the options.

    Attributes:
        ranks_per_node: ranks are numbered node by node.
    """

    ranks_per_node: int


@dataclass(frozen=True)
class Status:
    """Show all clusters of this machine."""


@dataclass(frozen=True, kw_only=True)
class Down(Named):
    """Take a cluster down, with everything that runs in it."""


def main(arguments: list[str]) -> int:
    """Run ``axonn cluster``; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's, or something that the machine lacks.
    """
    known: dict[str, tuple[type, Callable[..., int]]] = {
        "up": (Up, _up),
        "exec": (Exec, _exec),
        "run": (Run, _run),
        "status": (Status, _status),
        "down": (Down, _down),
    }
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = [
            f"  axonn cluster {name:<8}{(kind.__doc__ or '').splitlines()[0]}" for name, (kind, _) in known.items()
        ]
        print("usage: axonn cluster COMMAND [--help] [OPTIONS]", "", *lines, sep="\n")
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    if name not in known:
        raise ConfigError(f'"{name}" is nothing that axonn cluster does; use one of {", ".join(known)}')
    kind, function = known[name]
    before, words = command_apart(rest, 1) if kind is Exec else command_apart(rest, 0) if kind is Run else (rest, [])
    options: Any = read(kind, before, f"axonn cluster {name}")
    if problem := lacking():
        raise ConfigError(problem)
    return function(options, words) if kind in (Exec, Run) else function(options)


def command_apart(arguments: list[str], positionals: int) -> tuple[list[str], list[str]]:
    """Options, all of which take a value, and positional arguments; and the command that is behind them."""
    at = 0
    while at < len(arguments):
        word = arguments[at]
        if word == "--":
            break
        if word.startswith("-") and not word.lstrip("-").isdecimal():
            at += 1 if "=" in word or word in ("-h", "--help") else 2
        elif positionals:
            positionals, at = positionals - 1, at + 1
        else:
            break
    return arguments[:at], arguments[at:]


def _up(options: Up) -> int:
    name, nodes = cluster_name(options.name), node_count(options.nodes)
    latency, bandwidth = nanoseconds(options.latency), bits_per_second(options.bandwidth)
    _sweep()
    start(name, nodes, latency, bandwidth, owner=0)
    print(f'cluster "{name}" is up: {nodes} nodes, {shown(latency, bandwidth)}')
    suffix = "" if name == DEFAULT_NAME else f" --name {name}"
    print(f"  axonn cluster exec{suffix} 0 COMMAND\n  axonn cluster down{suffix}")
    return 0


def _exec(options: Exec, command: list[str]) -> int:
    switch, words = _found(options.name), _command(command)
    if not 0 <= options.node < switch.nodes:
        raise ConfigError(
            f'node {options.node} is not in cluster "{switch.name}"; choose one from 0 to {switch.nodes - 1}'
        )
    switch.enter(options.node)
    os.environ.update(environment(switch))
    _quieten()
    sys.stdout.flush()
    try:
        os.execvp(words[0], words)
    except OSError as error:
        raise ConfigError(f"{words[0]} cannot be run: {error.strerror}; give a command that is installed") from None


def _run(options: Run, command: list[str]) -> int:
    switch, words = _found(options.name), _command(command)
    place, per_node = place_rank(switch, options.ranks_per_node), options.ranks_per_node
    os.environ[processes.RUN] = str(os.getpid())
    try:
        launch(_rank, switch.nodes * per_node, words, place=place)
    except RankFailed as failure:
        if not isinstance(failure.error, SystemExit):
            raise
        where = f"rank {failure.rank} on node {failure.rank // per_node}"
        print(f"axonn: {where} ended with exit code {failure.error.code}", file=sys.stderr)
        return int(failure.error.code or 1)
    finally:
        processes.end(processes.inside(switch, run=str(os.getpid())))  # what the commands started and left
    return 0


def _status(options: Status) -> int:
    clusters = processes.running()
    for switch in clusters:
        owner = f"ends with process {switch.owner}" if switch.owner else "until `axonn cluster down`"
        print(f'cluster "{switch.name}": {switch.nodes} nodes, {shown(switch.latency, switch.bandwidth)}, {owner}')
        print(f"  {_counted(processes.inside(switch))} inside, switch is process {switch.pid}")
        for node, counted in enumerate(traffic(switch.counters(), switch.nodes)):
            print(f"  node {node}: {counted.sent:,} bytes sent, {counted.received:,} received")
    if not clusters:
        print("no cluster is up")
    return 0


def _down(options: Down) -> int:
    swept = _sweep()
    switch = next((found for found in processes.running() if found.name == options.name), None)
    if switch is None and swept:
        return 0
    switch = switch or _found(options.name)
    if switch.owner:
        raise ConfigError(
            f'cluster "{switch.name}" belongs to process {switch.owner} and ends with it; stop that process instead'
        )
    inside = processes.inside(switch)
    processes.end(inside)
    processes.end([switch.pid])
    also = f", and with it {_counted(inside)} that ran there" if inside else ""
    print(f'cluster "{switch.name}" is down{also}')
    return 0


def _sweep() -> list[int]:
    swept = sweep()
    if swept:
        print(f"ended {_counted(swept)} left over in a cluster that is gone: {', '.join(map(str, swept))}")
    return swept


def _counted(pids: list[int]) -> str:
    return f"{len(pids)} process{'' if len(pids) == 1 else 'es'}"


def _found(name: str) -> Switch:
    clusters = {switch.name: switch for switch in processes.running()}
    if name not in clusters:
        others = f"use --name with one of {', '.join(clusters)}" if clusters else "make it with axonn cluster up"
        raise ConfigError(f'no cluster named "{name}" is up; {others}')
    return clusters[name]


def _command(words: list[str]) -> list[str]:
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        raise ConfigError("no command was given; write it after the options, such as python train.py")
    return words


def _quieten() -> None:
    """Else c10d warns at every connection that nobody tells it the peer's host name."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _rank(words: list[str]) -> None:
    """One rank: the command as a child that is told of signals, and killed if this process is.

    Raises:
        SystemExit: it failed, with its exit code.
    """
    _quieten()
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl

    def die_with_parent() -> None:
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)

    try:
        # In a session of its own it gets a terminal's Ctrl-C once, from here.
        process = subprocess.Popen(words, start_new_session=True, preexec_fn=die_with_parent)
    except OSError as error:
        raise ConfigError(f"{words[0]} cannot be run: {error.strerror}; give a command that is installed") from None
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: process.send_signal(received))
    code = process.wait()
    if code:
        raise SystemExit(code if code > 0 else 128 - code)
