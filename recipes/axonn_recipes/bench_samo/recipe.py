"""``axonn bench samo``: the step of compressed state beside that of dense state, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from axonn_plugins.cli.options import read
from axonn_recipes.bench.claims import beside
from axonn_recipes.bench.output import publish
from axonn_recipes.bench_samo import report
from axonn_recipes.bench_samo.measure import passes, steps
from axonn_recipes.bench_samo.settings import Options, described, resolve
from axonn_recipes.runs import new_folder


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    options = read(Options, arguments, "axonn bench samo")
    settings = resolve(options)
    folder = new_folder(options.runs, options.name, "bench_samo")
    print(described(settings), end="\n\n", flush=True)
    if options.dry_run:
        return 0
    sides, copying = steps(settings)
    numbers = report.results(settings, sides, copying, passes(settings) if settings.passes else [])
    said = beside(
        __file__,
        lambda words: resolve(read(Options, words)),
        settings,
        {f"{pair['side']} / {pair['over']}": pair["median"] for pair in numbers["ratios"]},
    )
    publish(folder, numbers, "\n".join([report.text(numbers), *said]))
    return 0
