"""Where a benchmark runs, and where its results go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from axonn_plugins.cluster import Cluster
from axonn_plugins.cluster.launch import launch
from axonn_recipes.bench_pccl.settings import Places


def on_each(places: Places, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run `function(*arguments)` on all ranks of each cluster, and return the results of each rank 0."""
    found = []
    for nodes, ranks in places.layouts:
        if nodes == 1:
            found.append(launch(function, ranks, *arguments)[0])
            continue
        with Cluster(nodes, places.latency, places.bandwidth) as cluster:
            found.append(cluster.launch(function, ranks, *arguments)[0])
    return found
