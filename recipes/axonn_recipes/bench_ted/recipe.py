"""``axonn bench ted``: a step of an MoE GPT with stock DeepSpeed-MoE and with TED, by part, on an emulated cluster."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

from axonn_plugins.cli.options import read
from axonn_plugins.cluster import Cluster
from axonn_plugins.cluster.launch import launch
from axonn_plugins.config import ConfigError
from axonn_recipes.bench.claims import beside
from axonn_recipes.bench.output import publish
from axonn_recipes.bench_ted import report
from axonn_recipes.bench_ted.measure import Side, measure
from axonn_recipes.bench_ted.settings import Options, Settings, described, resolve
from axonn_recipes.runs import new_folder


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's, no cluster can be emulated here, or sides that do not compute the same.
    """
    options = read(Options, arguments, "axonn bench ted")
    runs = resolve(options)
    folder = new_folder(options.runs, options.name, "bench_ted")
    print(described(runs), end="\n\n", flush=True)
    if options.dry_run:
        return 0
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError("axonn bench ted measures DeepSpeed-MoE, but DeepSpeed is not installed; install deepspeed")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    numbers = report.results([(settings, run(settings)) for settings in runs])
    said = [
        f"{settings.ranks} ranks, {line}"
        for settings, found in zip(runs, numbers["runs"], strict=True)
        for line in beside(__file__, _asked, settings, {each["side"]: each["median"] for each in found["ratios"]})
    ]
    publish(folder, numbers, "\n".join([report.text(numbers), *said]), report.pictures(numbers))
    return 0


def _asked(words: Sequence[str]) -> list[Settings]:
    return resolve(read(Options, words))


def run(settings: Settings) -> list[Side]:
    """Measure on a cluster of its own, or on ranks of this machine."""
    if settings.local:
        return launch(measure, settings.ranks, settings)[0]
    with Cluster(settings.nodes, settings.latency, settings.bandwidth) as cluster:
        return cluster.launch(measure, settings.ranks_per_node, settings)[0]
