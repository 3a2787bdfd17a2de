"""Settings of a run of the benchmark, read from the command line and checked before anything is started."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from axonn_plugins.cluster.units import bits_per_second, nanoseconds
from axonn_plugins.config import ConfigError
from axonn_plugins.pccl.algorithms import algorithms
from axonn_plugins.pccl.choice import Choice
from axonn_recipes.bench_tp.settings import under_torchrun
from axonn_recipes.options import Run, at_least_one

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
_UNITS = {"": 1, "K": 2**10, "M": 2**20}


@dataclass(frozen=True, kw_only=True)
class Network:
    """Between emulated nodes.

    Attributes:
        latency: between emulated nodes, one way.
        bandwidth: of an emulated node in each direction.
    """

    latency: str = "500us"
    bandwidth: str = "500Mbit"


@dataclass(frozen=True, kw_only=True)
class Places(Network):
    """Where something is measured.

    Attributes:
        layouts: (nodes, ranks a node) of each cluster, one after another.
        emulated: whether nodes are emulated.
    """

    layouts: tuple[tuple[int, int], ...]
    emulated: bool


@dataclass(frozen=True, kw_only=True)
class Tuned(Network, Run):
    """Options of a run with PCCL.

    Attributes:
        tune: tune PCCL first, if it never was on such nodes.
    """

    tune: bool = False


@dataclass(frozen=True, kw_only=True)
class Options(Tuned):
    """PCCL, its algorithms, and the library that there is, side by side in one run.

    Attributes:
        train: train by ZeRO-3 instead; --train --help tells that benchmark's options.
        layouts: nodes x ranks a node, such as 4x2,8x4; 1x4 is one node.
        collectives: some of these.
        sizes: bytes of all blocks.
        algorithms: measured besides what PCCL takes of itself; chunks behind a slash as in ring/2.
        rounds: timed turns of every side.
    """

    train: bool = False
    layouts: str = "4x2,8x2,8x4,16x2"
    collectives: str = ",".join(COLLECTIVES)
    sizes: str = "16K,64K,256K,1M,4M,16M,64M"
    algorithms: str = "ring,hierarchical_ring_direct,hierarchical_log_direct"
    rounds: int = 5


@dataclass(frozen=True, kw_only=True)
class Settings(Places):
    """Everything that decides what is measured.

    Attributes:
        collectives: names.
        sizes: bytes of all blocks.
        algorithms: measured besides what PCCL takes of itself.
        rounds: timed turns of every side.
        tune: whether PCCL is tuned first, or goes by its rules of thumb.
    """

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    algorithms: tuple[Choice, ...]
    rounds: int
    tune: bool


def resolve(options: Options) -> Settings:
    """The run that the command line asks for.

    Raises:
        ConfigError: the first mistake.
    """
    at_least_one(options, "rounds")
    nanoseconds(options.latency), bits_per_second(options.bandwidth)
    collectives = tuple(options.collectives.split(","))
    for collective in collectives:
        if collective not in COLLECTIVES:
            raise ConfigError(f"--collectives {collective} is not measured; choose from {', '.join(COLLECTIVES)}")
    return Settings(
        layouts=layouts(options.layouts),
        emulated=not under_torchrun(),
        latency=options.latency,
        bandwidth=options.bandwidth,
        collectives=collectives,
        sizes=tuple(_size(text) for text in options.sizes.split(",")),
        algorithms=tuple(_algorithm(text) for text in options.algorithms.split(",") if text),
        rounds=options.rounds,
        tune=options.tune,
    )


def layouts(text: str) -> tuple[tuple[int, int], ...]:
    """(nodes, ranks a node) of each cluster that is asked for, or of the one that torchrun has started.

    Raises:
        ConfigError: one is not of the form 4x2, or has a single rank.
    """
    asked = tuple(_layout(each) for each in text.split(","))
    if not under_torchrun():
        return asked
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    return ((int(os.environ["WORLD_SIZE"]) // local, local),)


def _layout(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not found or text == "1x1":
        raise ConfigError(f"--layouts {text} is not nodes x ranks a node, of at least 2 ranks; write it as in 4x2")
    return int(found[1]), int(found[2])


def _size(text: str) -> int:
    found = re.fullmatch(r"([1-9]\d*)([KM]?)", text)
    if not found:
        raise ConfigError(f"--sizes {text} is not a size; write bytes, or KiB and MiB as in 64K or 16M")
    return int(found[1]) * _UNITS[found[2]]


def _algorithm(text: str) -> Choice:
    try:
        choice = Choice.read(text)
    except ValueError as error:
        raise ConfigError(f"--algorithms: {error}") from error
    known = algorithms("all_reduce", 2)
    if choice.algorithm not in known:
        raise ConfigError(f"--algorithms {text} is not known; choose from {', '.join(known)}")
    return choice


def described(settings: Settings) -> str:
    """The run in words."""
    lines = [
        where(settings),
        f"{', '.join(settings.collectives)} of {', '.join(shown(size) for size in settings.sizes)} in all",
        f"sides: pccl ({'tuned' if settings.tune else 'rules of thumb, or what was measured before'}), gloo, mpi, "
        + ", ".join(map(str, settings.algorithms)),
        f"{settings.rounds} timed rounds, in turns",
    ]
    return "\n".join(lines)


def where(settings: Places) -> str:
    """The clusters in words."""
    network = "under torchrun"
    if settings.emulated:
        network = f"emulated, latency {settings.latency}, bandwidth {settings.bandwidth} a node"
    return f"nodes x ranks: {', '.join(f'{nodes}x{ranks}' for nodes, ranks in settings.layouts)}, {network}"


def shown(size: int) -> str:
    """Bytes in short."""
    return f"{size // 2**20}M" if size % 2**20 == 0 else f"{size // 2**10}K" if size % 2**10 == 0 else str(size)
