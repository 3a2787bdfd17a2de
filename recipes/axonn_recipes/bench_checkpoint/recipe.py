"""``axonn bench checkpoint``: what checkpoints cost a training run, asynchronous and synchronous, on ranks of this machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from axonn_plugins.cli.options import read
from axonn_plugins.cluster.launch import launch
from axonn_recipes.bench.numbers import ratios, spread
from axonn_recipes.bench.output import MIB, extremes, ms, publish, table
from axonn_recipes.bench_checkpoint.measure import ALONE, ASYNCHRONOUS, Side, measure
from axonn_recipes.bench_checkpoint.settings import Options, Settings, resolve
from axonn_recipes.runs import new_folder

_BAR = 0.02
_GOT: dict[str, Callable[[Side], list[float]]] = {
    "seconds": lambda side: side.seconds,
    "processor": lambda side: side.processor,
}
_WHAT = {"seconds": "time", "processor": "processor time"}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    options = read(Options, arguments, "axonn bench checkpoint")
    settings = resolve(options)
    folder = new_folder(options.runs, options.name, "bench_checkpoint")
    print(described(settings), end="\n\n", flush=True)
    if options.dry_run:
        return 0
    sides, size = launch(measure, settings.ranks, settings, folder / "checkpoints")[0]
    numbers = results(settings, sides, size)
    publish(folder, numbers, text(numbers))
    return 0


def described(settings: Settings) -> str:
    """The run in words."""
    return (
        f"{settings.ranks} ranks of this machine, gz={settings.ranks}, gloo; GPT: {settings.layers} blocks, hidden {settings.hidden}, fp32, AdamW; "
        f"{settings.batch} x {settings.context} tokens a step\n"
        f"{settings.rounds} rounds of {settings.every} steps each, in turns; a checkpoint at a round's beginning is complete at its end"
    )


def results(settings: Settings, sides: Sequence[Side], size: int) -> dict[str, Any]:
    """Everything measured, as what JSON can hold; seconds, and shares of a round without checkpoints."""
    none, *others = sides
    costs = {
        which: {
            side.name: spread([share - (side.name != ALONE) for share in ratios(got(side), got(none))])
            for side in others
        }
        for which, got in _GOT.items()
    }
    return {
        "torch": torch.__version__,
        "settings": asdict(settings),
        "bytes": size,
        "sides": [asdict(side) for side in sides],
        "costs": costs,
    }


def text(numbers: dict[str, Any]) -> str:
    """The numbers to read."""
    middle = lambda key: lambda side: ms(statistics.median(side[key]))  # noqa: E731
    shown = table(
        {
            "": lambda side: side["name"],
            "round ms": middle("seconds"),
            "min-max": lambda side: extremes(side["seconds"]),
            "processor ms": middle("processor"),
            "stopped ms": middle("stopped"),
        },
        numbers["sides"],
    )
    costs = numbers["costs"]
    most = max(costs["seconds"][ASYNCHRONOUS]["median"], costs["processor"][ALONE]["median"])
    verdict = "met" if most < _BAR else "not met"
    lines = [shown, f"a checkpoint has {numbers['bytes'] / MIB:.1f} MiB of tensors"]
    for which, costs in numbers["costs"].items():
        lines += [
            f"{name}: {_share(cost)} {'of the' if name == ALONE else 'more'} {_WHAT[which]}"
            for name, cost in costs.items()
        ]
    return "\n".join([*lines, f"asked: asynchronous ones under {_BAR:.0%} of the time: {verdict}"])


def _share(found: dict[str, Any]) -> str:
    return f"{found['median']:.1%} (quartiles {found['low']:.1%} to {found['high']:.1%})"
