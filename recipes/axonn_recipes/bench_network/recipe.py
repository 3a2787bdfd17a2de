"""``axonn bench network``: measure this machine, an emulated cluster or, under torchrun, a real one, and write the planner's file of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from axonn_plugins.cli.options import read
from axonn_plugins.cluster.units import bits_per_second, nanoseconds
from axonn_plugins.config import ConfigError
from axonn_plugins.observe.files import put
from axonn_plugins.planner import files
from axonn_plugins.planner.machine import measured_file
from axonn_recipes.bench_network.measure import Measured, measure
from axonn_recipes.bench_network.report import described, merged, toml
from axonn_recipes.bench_pccl.places import on_each
from axonn_recipes.bench_pccl.settings import Network, Places, layouts, where
from axonn_recipes.bench_tp.settings import under_torchrun
from axonn_recipes.options import Run
from axonn_recipes.runs import new_folder

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, kw_only=True)
class Options(Network, Run):
    """Measure this machine, an emulated cluster or, under torchrun, a real one, and write the planner's file of it.

    Attributes:
        layouts: nodes x ranks a node; 1x4 is one node.
        size: bytes that a ring gathers; the paper's is 1G.
        matrix: edge of the matrices multiplied.
        rounds: how often each is timed.
    """

    layouts: str = "1x2"
    size: str = "64M"
    matrix: int = 1024
    rounds: int = 5


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    options = read(Options, arguments, "axonn bench network")
    places, size = _resolve(options)
    first = os.environ.get("RANK", "0") == "0"
    if first:
        print(f"{where(places)}; rings of {options.size}, {options.rounds} rounds", flush=True)
    if options.dry_run:
        return 0
    folder = new_folder(options.runs, options.name, "bench_network") if first else None
    asked = (size, options.matrix, options.rounds)
    measured: Measured = measure(*asked) if under_torchrun() else on_each(places, measure, *asked)[0]
    if folder:
        folder.mkdir(parents=True)
        file = folder / "machine.toml"
        put(file, toml(measured, options.size, where(places)))
        print(f"{described(measured)}\n\n{file}: axonn plan --machine {file}")
        if not places.emulated or places.layouts[0][0] == 1:
            kept = measured_file()
            kept.parent.mkdir(parents=True, exist_ok=True)
            put(kept, merged(file.read_text(), _products(kept)))
            print(f'{kept}: what sizes that are "auto" in an "axonn" block go by on this machine')
    return 0


def _products(kept: Path) -> dict[str, str]:
    """The keys that ``axonn bench matmul`` wrote into the file that was there."""
    known = files.read("--machine", kept) if kept.is_file() else {}
    return {key: json.dumps(known[key]) for key in ("sustained", "product_half") if key in known}


def _resolve(options: Options) -> tuple[Places, int]:
    nanoseconds(options.latency), bits_per_second(options.bandwidth)
    found = re.fullmatch(r"([1-9][0-9]{0,5})([KMG])", options.size)
    if found is None:
        raise ConfigError(f'--size = "{options.size}" is not a size; write KiB, MiB or GiB as in 64M')
    for name, least in (("matrix", 16), ("rounds", 1)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} = {getattr(options, name)} is too small; use {least} or more")
    asked = layouts(options.layouts)
    if len(asked) > 1:
        raise ConfigError(
            f"--layouts = {options.layouts} names {len(asked)} clusters; a machine file is of one, such as 2x4"
        )
    return Places(
        layouts=asked, emulated=not under_torchrun(), latency=options.latency, bandwidth=options.bandwidth
    ), int(found[1]) * _UNITS[found[2]]
