"""Where a benchmark runs, and where its results go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from plugins.cluster import Cluster
from plugins.config import ConfigError
from plugins.launch import launch
from recipes.bench_pccl.settings import Places


def on_each(places: Places, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What rank 0 of each cluster returned of `function(*arguments)`, which all of its ranks run."""
    found = []
    for nodes, ranks in places.layouts:
        if nodes == 1:
            found.append(launch(function, ranks, *arguments)[0])
            continue
        with Cluster(nodes, places.latency, places.bandwidth) as cluster:
            found.append(cluster.launch(function, ranks, *arguments)[0])
    return found


def folder_of(runs: Path, name: str | None, default: str) -> Path:
    """The folder of a new run: a name that was given, or the default with the next number.

    Raises:
        ConfigError: a named one exists.
    """
    if name is not None:
        if (runs / name).exists():
            raise ConfigError(f"{runs / name} exists; choose another --name")
        return runs / name
    number = 1
    while (runs / (chosen := default if number == 1 else f"{default}-{number}")).exists():
        number += 1
    return runs / chosen
