"""``axonn train validation``: a GPT and a U-Net with every axis in use and everything on, beside the serial models."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import product

import torch

from axonn_plugins.cli.options import read
from axonn_plugins.cluster.launch import launch
from axonn_recipes.validation import report
from axonn_recipes.validation.problems import SIZES, Problem, problem
from axonn_recipes.validation.report import Pair
from axonn_recipes.validation.settings import BOUNDS, MODELS, Options, Settings, resolve
from axonn_recipes.validation.train import Role, curve


def main(arguments: Sequence[str]) -> int:
    """Train and compare as the command line says; returns the exit code, 1 where a bound is broken.

    Raises:
        ConfigError: a mistake of the user's.
    """
    options = read(Options, arguments, "axonn train validation")
    settings = resolve(options)
    problems = {name: problem(name, settings) for name in ([options.model] if options.model else MODELS)}
    dtypes: list[str] = [options.dtype] if options.dtype else list(BOUNDS)
    pairs = {(pair.model, pair.dtype): pair for pair in report.earlier(options.out, settings)}
    print(_described(settings, problems, dtypes), end="\n\n", flush=True)
    if options.dry_run:
        return 0
    for name, made in problems.items():
        for dtype in dtypes:
            pair = pairs[name, dtype] = _trained(name, made, dtype, settings)
            if pair.good:
                print(pair.verdict(), flush=True)
            else:
                print(f"axonn: {pair.verdict()}", file=sys.stderr)
            ordered = [pairs[key] for key in product(MODELS, BOUNDS) if key in pairs]
            written = report.write(ordered, settings, options.out)
    print("", *written, sep="\n")
    return 0 if all(pairs[name, dtype].good for name in problems for dtype in dtypes) else 1


def _described(settings: Settings, problems: dict[str, Problem], dtypes: list[str]) -> str:
    """The run in words."""
    lines = [
        settings.grid.draw(),
        "",
        f"layout {settings.layout}, overlap, activation checkpointing, tuning: everything on",
    ]
    for name, made in problems.items():
        with torch.device("meta"):
            parameters = sum(p.numel() for p in made.build().parameters())
        lines.append(
            f"{MODELS[name][0]}: {parameters:,} parameters, batch {SIZES[settings.size].batch[name]}, {settings.steps} steps, {' and '.join(dtypes)}"
        )
    return "\n".join(lines)


def _trained(name: str, made: Problem, dtype: str, settings: Settings) -> Pair:
    """The curves."""
    serial, alone = _timed(made, dtype, settings, "serial")
    control, _ = _timed(made, dtype, settings, "control")
    parallel, together = _timed(made, dtype, settings, "parallel")
    return Pair(name, dtype, serial, control, parallel, seconds=(alone, together))


def _timed(made: Problem, dtype: str, settings: Settings, role: Role) -> tuple[list[float], float]:
    ranks = settings.grid.world if role == "parallel" else 1
    began = time.perf_counter()
    losses = launch(curve, ranks, made, getattr(torch, dtype), settings, role)[0]
    return losses, time.perf_counter() - began
