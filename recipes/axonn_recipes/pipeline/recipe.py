"""``axonn train pipeline``: a GPT on one process, under DeepSpeed's pipeline and under ours (000, Figures 3.8 and 4.8)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axonn_plugins.cli.options import read
from axonn_plugins.cluster.launch import launch
from axonn_plugins.observe.figures import Picture
from axonn_plugins.observe.metrics import MetricsLogger, format_split
from axonn_recipes.bench.output import ms, publish, table
from axonn_recipes.bench.rounds import apart
from axonn_recipes.data import load
from axonn_recipes.pipeline.settings import SIDES, Options, Settings, described, resolve
from axonn_recipes.runs import new_folder

if TYPE_CHECKING:
    from axonn_recipes.pipeline.sides import Outcome


def main(arguments: Sequence[str]) -> int:
    """Train the sides as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    options = read(Options, arguments, "axonn train pipeline")
    settings = resolve(options)
    folder = new_folder(options.runs, options.name, "pipeline")
    print(described(settings), end="\n\n", flush=True)
    if options.dry_run:
        print(json.dumps(settings.ds_config("message_driven"), indent=2))
        return 0
    corpus = load(options.data, settings.context)
    # DeepSpeed is imported here, before ranks are forked.
    from axonn_recipes.pipeline.sides import train

    outcomes = {}
    for side in SIDES if options.side is None else (options.side,):
        ranks = 1 if side == "serial" else settings.ranks
        outcomes[side] = launch(train, ranks, side, settings, corpus)[0]
        _log(outcomes[side], folder / side, settings.steps)
    numbers = results(settings, outcomes)
    print()
    publish(folder, numbers, text(numbers), {"curves.png": Picture(partial(_curves, numbers))})
    return 0


def _log(outcome: Outcome, folder: Path, steps: int) -> None:
    """metrics.jsonl of a side, and some of its steps on the screen."""
    logger = MetricsLogger(folder)
    for step, (loss, seconds) in enumerate(zip(outcome.losses, outcome.seconds, strict=True), 1):
        phases = outcome.splits[step - 1] if outcome.splits else {}
        logger.log(step, loss=loss, step_s=seconds, **{f"{name}_s": value for name, value in phases.items()})
        if step % max(steps // 10, 1) == 0:
            line = f"{folder.name:15} step {step:>{len(str(steps))}}/{steps}  loss {loss:8.4f}  {1e3 * seconds:7.0f} ms"
            print(f"{line}  {format_split(phases)}".rstrip(), flush=True)
    logger.finish()


def results(settings: Settings, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """Everything measured, as what JSON can hold."""
    numbers: dict[str, Any] = {
        "settings": asdict(settings),
        "sides": {name: {**asdict(side), "step_s": statistics.median(side.seconds)} for name, side in outcomes.items()},
        "differences": {},
    }
    ours = outcomes.get("message_driven")
    for name, side in outcomes.items():
        if ours is not None and side is not ours:
            numbers["differences"][name] = apart(side.losses, ours.losses, relative=True)
    return numbers


def text(numbers: dict[str, Any]) -> str:
    """The sides, and how far apart their losses are."""
    shown = table(
        {
            "": lambda named: named[0],
            "first loss": lambda named: f"{named[1]['losses'][0]:.6f}",
            "last loss": lambda named: f"{named[1]['losses'][-1]:.6f}",
            "step ms": lambda named: ms(named[1]["step_s"]),
        },
        numbers["sides"].items(),
    )
    steps = numbers["settings"]["steps"]
    lines = [shown]
    for name, difference in numbers["differences"].items():
        lines.append(
            f"largest relative difference of message_driven's losses from {name}'s in {steps} steps: {difference:.2e}"
        )
    state = numbers["sides"].get("message_driven", {}).get("state")
    if state:
        lines.append(f"model state of rank 0: {state[0]:,} bytes on the device, {state[1]:,} in host memory")
    return "\n".join(lines)


def _curves(numbers: dict[str, Any], figure: Any) -> None:
    """The curves of Figure 3.8's form."""
    axes = figure.subplots()
    styles = dict(zip(SIDES, ("-", "--", ":"), strict=True))
    for name, side in numbers["sides"].items():
        axes.plot(range(1, len(side["losses"]) + 1), side["losses"], styles[name], label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
