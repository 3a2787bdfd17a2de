"""``axonn bench matmul``: matrix products of many shapes on this machine, and what the planner's file says of them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from axonn_plugins.cli.options import read
from axonn_plugins.config import ConfigError
from axonn_plugins.observe.files import put
from axonn_plugins.planner import files, machine
from axonn_recipes.bench_matmul.measure import Products, measure
from axonn_recipes.bench_network.report import merged
from axonn_recipes.bench_pccl.places import on_each
from axonn_recipes.bench_pccl.settings import Places
from axonn_recipes.bench_tp.settings import under_torchrun
from axonn_recipes.options import Run, at_least_one
from axonn_recipes.runs import new_folder


@dataclass(frozen=True, kw_only=True)
class Options(Run):
    """Matrix products of many shapes on this machine, and what the planner's file says of them.

    Attributes:
        ranks: processes that compute at the same time, without torchrun; on a CPU each has a core.
        dtype: of the elements; auto is bfloat16 on a GPU, float32 on a CPU.
        largest: edge of the largest square; 0 for 8192 on a GPU, 1024 on a CPU.
        size: MiB that are copied for the memory's bandwidth.
        rounds: how often each is timed.
        file: a machine file to write the result into; by default the one of axonn bench network, if it has measured this machine.
    """

    ranks: int = 1
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    largest: int = 0
    size: int = 256
    rounds: int = 5
    file: Path | None = None


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    options = read(Options, arguments, "axonn bench matmul")
    at_least_one(options, "ranks", "size", "rounds")
    if options.largest and options.largest < 16:
        raise ConfigError(f"--largest = {options.largest} is too small; use 16 or more, or 0 for the machine's own")
    if options.file is not None:
        if options.file.suffix == ".json":
            raise ConfigError(f'--file = "{options.file}" is JSON, but TOML alone is written; give a .toml file')
        machine.parse(str(options.file), files.read("--file", options.file), options.file.stem)
    first = os.environ.get("RANK", "0") == "0"
    if first:
        print(f"{options.ranks} ranks, {options.dtype} elements, {options.rounds} rounds", flush=True)
    if options.dry_run:
        return 0
    folder = new_folder(options.runs, options.name, "bench_matmul") if first else None
    asked = (options.dtype, options.largest, options.size * 2**20, options.rounds)
    alone = Places(layouts=((1, options.ranks),), emulated=True)
    found: Products = measure(*asked) if under_torchrun() else on_each(alone, measure, *asked)[0]
    if folder:
        folder.mkdir(parents=True)
        put(folder / "products.json", _json(found))
        print(f"{described(found)}\n\n{folder / 'products.json'}")
        print(_kept(found, options.file or machine.measured_file()))
    return 0


def keys(found: Products) -> dict[str, str]:
    """The keys of a machine file, and their values."""
    rate, half = found.fit
    return {
        "memory_bandwidth": f'"{found.memory_bandwidth / 1e9:.5g} GB/s"',
        "sustained": f'"{rate / 1e9:.5g} GFLOP/s"',
        "product_half": f"{half:.5g}",
    }


def described(found: Products) -> str:
    """A table, and the fit."""
    rate, half = found.fit
    lines = [
        f"{found.dtype} on {found.device}",
        f"{'M':>7} {'K':>7} {'N':>7} {'us':>10} {'Gflop/s':>9} {'by the fit':>11}",
    ]
    for (m, k, n), took in found.seconds.items():
        flops = 2 * m * k * n
        lines.append(
            f"{m:>7} {k:>7} {n:>7} {took * 1e6:>10.4g} {flops / took / 1e9:>9.4g} {flops / (flops + half) * rate / 1e9:>11.4g}"
        )
    lines.append(
        f"{rate / 1e9:.4g} Gflop/s sustained, half of it at {half:.3g} flop, {found.error:.0%} off on average; "
        f"memory {found.memory_bandwidth / 1e9:.4g} GB/s"
    )
    return "\n".join(lines)


def _json(found: Products) -> str:
    rate, half = found.fit
    products = [{"shape": shape, "seconds": took} for shape, took in found.seconds.items()]
    whole = {
        "device": found.device,
        "dtype": found.dtype,
        "sustained": rate,
        "product_half": half,
        "products": products,
    }
    return json.dumps(whole | {"memory_bandwidth": found.memory_bandwidth}, indent=2)


def _kept(found: Products, file: Path) -> str:
    if not file.is_file():
        lines = "\n".join(f"{key} = {value}" for key, value in keys(found).items())
        return f"{lines}\n{file} is not there: measure it by axonn bench network, then again, or give --file"
    put(file, merged(file.read_text(), keys(found)))
    return f"{file}: has sustained, product_half and memory_bandwidth"
