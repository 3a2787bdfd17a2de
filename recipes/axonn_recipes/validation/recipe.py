"""``axonn train validation``: a GPT and a U-Net with every axis in use and everything on, beside the serial models."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch

from axonn_plugins.cli.options import read
from axonn_plugins.cluster.launch import launch
from axonn_plugins.config import ConfigError
from axonn_recipes.validation import report
from axonn_recipes.validation.problems import SIZES, Problem, problem
from axonn_recipes.validation.report import Pair
from axonn_recipes.validation.settings import BOUNDS, MODELS, Options, Settings, resolve
from axonn_recipes.validation.train import Role, curve

_PROBED, _FEWEST = 4, 10
"""Steps by which a step's time is known, and of a curve at least."""
_USED = 0.9
"""Share of the given time that is used: a machine is not always as fast as in the first steps."""


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
            fitted = _fitted(name, made, dtype, settings, len(problems) * len(dtypes))
            pair = pairs[name, dtype] = _trained(name, made, dtype, fitted)
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
        steps = f"{settings.steps} steps" + (f" at most, in {settings.minutes:g} minutes" if settings.minutes else "")
        lines.append(
            f"{MODELS[name][0]}: {parameters:,} parameters, batch {SIZES[settings.size].batch[name]}, {steps}, {' and '.join(dtypes)}"
        )
    return "\n".join(lines)


def _fitted(name: str, made: Problem, dtype: str, settings: Settings, parts: int) -> Settings:
    """The settings with as many steps as fit into this model's and precision's part of the time, by what a few take.

    Raises:
        ConfigError: too few do.
    """
    if settings.minutes is None:
        return settings
    began = time.perf_counter()
    few = replace(settings, steps=_PROBED)
    once, step = 0.0, 0.0
    roles: dict[Role, int] = {"serial": 2, "parallel": 1}
    for role, runs in roles.items():
        started = time.perf_counter()
        seconds = _launched(made, dtype, few, role)[1]
        each = statistics.fmean(seconds[1:])
        once += runs * max(time.perf_counter() - started - each * _PROBED, 0.0)
        step += runs * each
    left = _USED * 60 * settings.minutes / parts - (time.perf_counter() - began) - once
    steps = min(settings.steps, int(left / step))
    whose = (
        f"{MODELS[name][0]} in {dtype}: {step:.2f} s a step of two serial runs and one on {settings.grid.world} ranks"
    )
    if steps < _FEWEST:
        least = settings.minutes + parts * (_FEWEST * step - left) / _USED / 60
        raise ConfigError(
            f"--minutes {settings.minutes:g} leave {max(steps, 0)} steps, and a curve has {_FEWEST} at least ({whose}); give "
            f"{math.ceil(10 * least) / 10:g} minutes, one --model and --dtype alone, or --size small"
        )
    print(f"{whose}: {steps} steps", flush=True)
    return replace(settings, steps=steps)


def _trained(name: str, made: Problem, dtype: str, settings: Settings) -> Pair:
    """The curves."""
    serial, alone = _timed(made, dtype, settings, "serial")
    control, _ = _timed(made, dtype, settings, "control")
    parallel, together = _timed(made, dtype, settings, "parallel")
    return Pair(name, dtype, serial, control, parallel, seconds=(alone, together))


def _timed(made: Problem, dtype: str, settings: Settings, role: Role) -> tuple[list[float], float]:
    began = time.perf_counter()
    losses = _launched(made, dtype, settings, role)[0]
    return losses, time.perf_counter() - began


def _launched(made: Problem, dtype: str, settings: Settings, role: Role) -> tuple[list[float], list[float]]:
    """Losses and seconds of each step."""
    ranks = settings.grid.world if role == "parallel" else 1
    return launch(curve, ranks, made, getattr(torch, dtype), settings, role)[0]
