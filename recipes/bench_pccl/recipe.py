"""``axonn bench pccl``: PCCL beside the native library, on emulated clusters or under torchrun."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plugins.cluster import Cluster
from plugins.config import ConfigError
from plugins.launch import launch
from plugins.pccl.build import load
from recipes.bench_pccl import mpi, report
from recipes.bench_pccl.measure import measure
from recipes.bench_pccl.settings import Settings, described, parser, resolve
from recipes.bench_tp.settings import under_torchrun


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's, or a side that computes wrong values.
    """
    options = parser().parse_args(arguments)
    settings = resolve(options)
    first = os.environ.get("RANK", "0") == "0"
    if first:
        print(described(settings), end="\n\n", flush=True)
    if options.dry_run:
        return 0
    folder = _folder(options.runs, options.name) if first else None
    load()  # compiles before ranks wait for each other
    measured = measure(settings) if under_torchrun() else _launched(settings)
    if folder:
        reason = mpi.absent()
        numbers = report.results(settings, measured, {"mpi": reason} if reason else {})
        print(report.table(numbers), end="\n\n")
        print(*report.write(numbers, folder), sep="\n")
    return 0


def _launched(settings: Settings) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = []
    for nodes, ranks in settings.layouts:
        if nodes == 1:
            cells += launch(measure, ranks, settings)[0]
            continue
        with Cluster(nodes, settings.latency, settings.bandwidth) as cluster:
            cells += cluster.launch(measure, ranks, settings)[0]
    return cells


def _folder(runs: Path, name: str | None) -> Path:
    """The folder of a new run.

    Raises:
        ConfigError: a named one exists.
    """
    if name is not None:
        if (runs / name).exists():
            raise ConfigError(f"{runs / name} exists; choose another --name")
        return runs / name
    number = 1
    while (runs / (chosen := "bench_pccl" if number == 1 else f"bench_pccl-{number}")).exists():
        number += 1
    return runs / chosen
