"""``axonn train pipeline``: a GPT on one process, under DeepSpeed's pipeline and under ours (000, Figures 3.8 and 4.8)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axonn_plugins.cluster.launch import launch
from axonn_plugins.observe.metrics import MetricsLogger, format_split
from axonn_recipes.data import load
from axonn_recipes.pipeline.settings import SIDES, Settings, described, parser, resolve
from axonn_recipes.runs import new_folder

if TYPE_CHECKING:
    from axonn_recipes.pipeline.sides import Outcome


def main(arguments: Sequence[str]) -> int:
    """Train the sides as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    options = parser().parse_args(arguments)
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
    print("\n" + table(numbers), end="\n\n")
    print(*write(numbers, folder), sep="\n")
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
            pairs = zip(side.losses, ours.losses, strict=True)
            numbers["differences"][name] = max(abs(a - b) / abs(a) for a, b in pairs)
    return numbers


def table(numbers: dict[str, Any]) -> str:
    """The sides, and how far apart their losses are."""
    lines = [f"{'':16}{'first loss':>12}{'last loss':>12}{'step ms':>10}"]
    for name, side in numbers["sides"].items():
        lines.append(f"{name:16}{side['losses'][0]:12.6f}{side['losses'][-1]:12.6f}{1e3 * side['step_s']:10.0f}")
    steps = numbers["settings"]["steps"]
    for name, apart in numbers["differences"].items():
        lines.append(
            f"largest relative difference of message_driven's losses from {name}'s in {steps} steps: {apart:.2e}"
        )
    state = numbers["sides"].get("message_driven", {}).get("state")
    if state:
        lines.append(f"model state of rank 0: {state[0]:,} bytes on the device, {state[1]:,} in host memory")
    return "\n".join(lines)


def write(numbers: dict[str, Any], folder: Path) -> list[Path]:
    """Write JSON, the table and the curves of Figure 3.8's form."""
    from matplotlib.figure import Figure

    made = [folder / name for name in ("results.json", "table.txt", "curves.png")]
    made[0].write_text(json.dumps(numbers, indent=1) + "\n")
    made[1].write_text(table(numbers) + "\n")
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    styles = dict(zip(SIDES, ("-", "--", ":"), strict=True))
    for name, side in numbers["sides"].items():
        axes.plot(range(1, len(side["losses"]) + 1), side["losses"], styles[name], label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(made[2], dpi=120)
    return made
