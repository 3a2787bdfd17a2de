"""What a run of the benchmark is, read from the command line and checked before anything is started."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass

from axonn_plugins.cluster.units import bits_per_second, nanoseconds
from axonn_plugins.config import ConfigError
from axonn_plugins.pccl.algorithms import algorithms
from axonn_plugins.pccl.choice import Choice
from axonn_recipes.bench_tp.settings import under_torchrun
from axonn_recipes.options import add_run, at_least_one

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
SIZES = "16K,64K,256K,1M,4M,16M,64M"
_UNITS = {"": 1, "K": 2**10, "M": 2**20}


@dataclass(frozen=True)
class Places:
    """Where something is measured.

    Attributes:
        layouts: (nodes, ranks a node) of each cluster, one after another.
        emulated: whether nodes are emulated; `latency` and `bandwidth` are theirs.
    """

    layouts: tuple[tuple[int, int], ...]
    emulated: bool
    latency: str
    bandwidth: str | None


@dataclass(frozen=True)
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


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="axonn bench pccl",
        description="PCCL, its algorithms, and the library that there is, side by side in one run.",
    )
    made.add_argument(
        "--train", action="store_true", help="train by ZeRO-3 instead; --train --help tells that benchmark's options"
    )
    add_places(made, "4x2,8x2,8x4,16x2")
    made.add_argument("--collectives", default=",".join(COLLECTIVES), help="(default %(default)s)")
    made.add_argument("--sizes", default=SIZES, help="bytes of all blocks (default %(default)s)")
    made.add_argument(
        "--algorithms",
        default="ring,hierarchical_ring_direct,hierarchical_log_direct",
        help="measured besides what PCCL takes of itself; chunks behind a slash as in ring/2 (default %(default)s)",
    )
    made.add_argument("--rounds", type=int, default=5, help="timed turns of every side (default 5)")
    add_tuned_run(made, "bench_pccl")
    return made


def add_places(made: argparse.ArgumentParser, layouts: str) -> None:
    """The options of `Places`; `layouts` is the default."""
    made.add_argument(
        "--layouts",
        default=layouts,
        help="nodes x ranks a node, such as 4x2,8x4; 1x4 is one node (default %(default)s)",
    )
    made.add_argument("--latency", default="500us", help="between emulated nodes, one way (default %(default)s)")
    made.add_argument(
        "--bandwidth", default="500Mbit", help="of an emulated node in each direction (default %(default)s)"
    )


def add_tuned_run(made: argparse.ArgumentParser, folder: str) -> None:
    """Options that every run has; `folder` is its default name."""
    made.add_argument("--tune", action="store_true", help="tune PCCL first, if it never was on such nodes")
    add_run(made, folder)


def resolve(options: argparse.Namespace) -> Settings:
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
        layouts(options.layouts),
        not under_torchrun(),
        options.latency,
        options.bandwidth,
        collectives,
        tuple(_size(text) for text in options.sizes.split(",")),
        tuple(_algorithm(text) for text in options.algorithms.split(",") if text),
        options.rounds,
        options.tune,
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
