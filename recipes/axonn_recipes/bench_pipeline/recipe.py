"""``axonn bench pipeline``: pipelines beside one another on emulated clusters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from axonn_plugins.cli.options import read
from axonn_plugins.cluster import Cluster
from axonn_recipes.bench.claims import beside
from axonn_recipes.bench_pipeline import report
from axonn_recipes.bench_pipeline.settings import Options, Settings, described, resolve
from axonn_recipes.runs import new_folder


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's, or no cluster can be emulated here.
    """
    options = read(Options, arguments, "axonn bench pipeline")
    runs = resolve(options)
    folder = new_folder(options.runs, options.name, "bench_pipeline")
    print(described(options.figure, runs), end="\n\n", flush=True)
    if options.dry_run:
        return 0
    # DeepSpeed is imported here, before ranks are forked.
    from axonn_recipes.bench_pipeline import measure, overlap

    if options.figure == "coarsening":
        report.publish_overlap(runs[0], _on_cluster(overlap.measure, runs[0]), folder)
    else:
        names = None if options.figure == "schedules" else measure.SWEPT[options.figure]
        numbers = report.results([(run, _on_cluster(measure.measure, run, names)) for run in runs])
        said = [
            f"{settings.scenario}, {line}"
            for settings, found in zip(runs, numbers["runs"], strict=True)
            for line in beside(
                __file__,
                lambda words: resolve(read(Options, words)),
                settings,
                {name: ratio["median"] for name, ratio in found["ratios"].items()},
            )
        ]
        report.publish(numbers, options.figure, folder, said)
        report.write_timeline(_on_cluster(measure.timelines, runs[0]), folder)
    return 0


def _on_cluster(function: Callable[..., Any], settings: Settings, *rest: Any) -> Any:
    with Cluster(settings.ranks, settings.latency, settings.bandwidth, jitter=settings.link_jitter) as cluster:
        return cluster.launch(function, 1, settings, *rest)[0]
