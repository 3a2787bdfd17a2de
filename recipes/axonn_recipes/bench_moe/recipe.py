"""``axonn bench moe``: a HF or a Megatron mixture of experts, ours beside DeepSpeed's AutoEP and AutoTP or Megatron's folding."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from axonn_plugins.cli.options import read
from axonn_plugins.config import ConfigError
from axonn_recipes.bench.claims import beside
from axonn_recipes.bench.output import publish
from axonn_recipes.bench_moe import hf, mcore
from axonn_recipes.bench_moe.launches import compare, unbuilt
from axonn_recipes.bench_moe.settings import Options, described, resolve
from axonn_recipes.bench_tp.measure import Side
from axonn_recipes.bench_tp.report import against, brief, brief_text
from axonn_recipes.runs import new_folder

_TOLERANCE = 1e-4  # of the first losses, relative: what rounding of fp32 explains, and no mistake
_BUILDERS: dict[str, Any] = {"hf": hf, "megatron": mcore}
_NEEDED = {"hf": "transformers", "megatron": "megatron"}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's, no cluster can be emulated here, or sides that do not compute the same.
    """
    options = read(Options, arguments, "axonn bench moe")
    settings = resolve(options)
    folder = new_folder(options.runs, options.name, "bench_moe")
    print(described(settings), end="\n\n", flush=True)
    if options.dry_run:
        return 0
    for package in ("deepspeed", _NEEDED[settings.model]):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"axonn bench moe --model {settings.model} needs {package}, which is not installed; install it"
            )
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    builder = _BUILDERS[settings.model]
    builder.load()
    ways = [(Side(settings.name(way), "ours" if way.ours else "peer", unbuilt), way) for way in settings.ways]
    numbers = brief(settings, compare(settings, ways, builder.build, _TOLERANCE))
    said = beside(__file__, lambda words: resolve(read(Options, words)), settings, against(numbers))
    publish(folder, numbers, "\n".join([brief_text(numbers), *said]))
    return 0
