"""``axonn bench pccl``: PCCL beside the native library, on emulated clusters or under torchrun."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from axonn_plugins.cli.options import read
from axonn_plugins.pccl.build import load
from axonn_recipes.bench.output import publish
from axonn_recipes.bench_pccl import mpi, report
from axonn_recipes.bench_pccl.measure import measure
from axonn_recipes.bench_pccl.places import on_each
from axonn_recipes.bench_pccl.settings import Options, Settings, described, resolve
from axonn_recipes.bench_tp.settings import under_torchrun
from axonn_recipes.runs import new_folder


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's, or a side that computes wrong values.
    """
    mpi.adopt()
    if "--train" in arguments:
        from axonn_recipes.bench_pccl import train

        return train.main([word for word in arguments if word != "--train"])
    options = read(Options, arguments, "axonn bench pccl")
    settings = resolve(options)
    first = os.environ.get("RANK", "0") == "0"
    if first:
        print(described(settings), end="\n\n", flush=True)
    if options.dry_run:
        return 0
    folder = new_folder(options.runs, options.name, "bench_pccl") if first else None
    load()  # compiles before ranks wait for each other
    measured = measure(settings) if under_torchrun() else _launched(settings)
    if folder:
        reason = mpi.absent()
        numbers = report.results(settings, measured, {"mpi": reason} if reason else {})
        publish(folder, numbers, report.text(numbers), report.pictures(numbers))
    mpi.leave()
    return 0


def _launched(settings: Settings) -> list[dict[str, Any]]:
    return [cell for cells in on_each(settings, measure, settings) for cell in cells]
