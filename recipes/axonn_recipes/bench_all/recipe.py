"""``axonn bench all``: every system at once beside DeepSpeed and Megatron on the same ranks of an emulated cluster."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from axonn_plugins.cli.options import read
from axonn_plugins.config import ConfigError
from axonn_recipes.bench.claims import beside
from axonn_recipes.bench.output import publish
from axonn_recipes.bench_all.report import results, text
from axonn_recipes.bench_all.settings import MEGATRON, OURS, Options, Settings, Way, described, resolve
from axonn_recipes.bench_moe.launches import compare, unbuilt
from axonn_recipes.bench_tp.measure import Side
from axonn_recipes.runs import new_folder

_TOLERANCE = 1e-5  # of the first losses, relative: what rounding of fp32 explains, and no mistake


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's, no cluster can be emulated here, or sides that do not compute the same.
    """
    options = read(Options, arguments, "axonn bench all")
    settings = resolve(options)
    folder = new_folder(options.runs, options.name, "bench_all")
    print(described(settings), end="\n\n", flush=True)
    if options.dry_run:
        return 0
    needed = ["deepspeed", *(["megatron"] if any(way.host == MEGATRON for way in settings.ways) else [])]
    for package in needed:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"axonn bench all measures {package}, which is not installed; install it, or leave it out with --{package} ''"
            )
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    _load(needed)
    ways = [(Side(str(way), "ours" if way.host == OURS else "peer", unbuilt), way) for way in settings.ways]
    numbers = results(settings, compare(settings, ways, build, _TOLERANCE))
    said = beside(
        __file__,
        lambda words: resolve(read(Options, words)),
        settings,
        {pair["host"]: pair["median"] for pair in numbers["best"]},
    )
    publish(folder, numbers, "\n".join([text(numbers), *said]))
    return 0


def build(settings: Settings, way: Way) -> Callable[[], Tensor]:
    """A side's training step on this rank."""
    module: Any
    if way.host == MEGATRON:
        from axonn_recipes.bench_all import mcore as module
    else:
        from axonn_recipes.bench_all import staged as module
    return module.build(settings, way)


def _load(packages: Sequence[str]) -> None:
    """Import what forked ranks need, once."""
    from axonn_recipes.bench_all import staged  # noqa: F401

    if "megatron" in packages:
        import megatron.core.models.gpt  # noqa: F401
