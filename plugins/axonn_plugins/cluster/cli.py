"""The commands ``axonn cluster up|exec|run|status|down``."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from axonn_plugins.cluster import environment, place_rank, processes, sweep, traffic
from axonn_plugins.cluster.launch import RankFailed, launch
from axonn_plugins.cluster.switch import Switch, lacking, start
from axonn_plugins.cluster.units import bits_per_second, cluster_name, nanoseconds, node_count, shown
from axonn_plugins.config import ConfigError

DEFAULT_NAME = "axonn"


def main(arguments: Sequence[str]) -> int:
    """Run ``axonn cluster``; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's, or something that the machine lacks.
    """
    parsed = _parser().parse_args(arguments)
    if problem := lacking():
        raise ConfigError(problem)
    return parsed.function(parsed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="axonn cluster",
        description="Emulate a cluster on this machine: nodes that are network namespaces, behind a switch.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="make a cluster that stays until `down`")
    up.add_argument("--nodes", type=int, required=True, help="1 to 64")
    up.add_argument("--latency", default="0us", help="from node to node, one way: 100us, 0.5ms (default 0us)")
    up.add_argument("--bandwidth", help="of a node, in each direction: 500Mbit, 10Gbit (default no limit)")
    _add_name(up, _up)
    execute = commands.add_parser("exec", help="run a command on one node")
    execute.add_argument("node", type=int, metavar="NODE", help="the first is 0")
    execute.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND...")
    _add_name(execute, _exec)
    run = commands.add_parser("run", help="run a command as ranks on all nodes, with torchrun's variables set")
    run.add_argument("--ranks-per-node", type=int, required=True, help="ranks are numbered node by node")
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND...")
    _add_name(run, _run)
    commands.add_parser("status", help="show all clusters of this machine").set_defaults(function=_status)
    _add_name(commands.add_parser("down", help="take a cluster down, with everything that runs in it"), _down)
    return parser


def _add_name(parser: argparse.ArgumentParser, function: object) -> None:
    parser.add_argument("--name", default=DEFAULT_NAME, help=f"the cluster's (default {DEFAULT_NAME})")
    parser.set_defaults(function=function)


def _up(options: argparse.Namespace) -> int:
    name, nodes = cluster_name(options.name), node_count(options.nodes)
    latency, bandwidth = nanoseconds(options.latency), bits_per_second(options.bandwidth)
    _sweep()
    start(name, nodes, latency, bandwidth, owner=0)
    print(f'cluster "{name}" is up: {nodes} nodes, {shown(latency, bandwidth)}')
    suffix = "" if name == DEFAULT_NAME else f" --name {name}"
    print(f"  axonn cluster exec{suffix} 0 COMMAND\n  axonn cluster down{suffix}")
    return 0


def _exec(options: argparse.Namespace) -> int:
    switch, words = _found(options.name), _command(options.words)
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


def _run(options: argparse.Namespace) -> int:
    switch, words = _found(options.name), _command(options.words)
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


def _status(options: argparse.Namespace) -> int:
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


def _down(options: argparse.Namespace) -> int:
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
