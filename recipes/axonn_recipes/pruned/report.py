"""What is said of both sides: a table, JSON, and the validation curves as a picture."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from axonn_recipes.pruned.plan import Plan
from axonn_recipes.pruned.train import Outcome, Problem
from samo.memory import dense_bytes, layers_of, our_bytes, paper_bytes

MIB = 2**20


def described(plan: Plan, title: str, make: Callable[[], nn.Module]) -> str:
    """The run in words, and what it needs by the memory model.

    Args:
        plan: the run.
        title: the model in words.
        make: builds the model; called on the meta device.
    """
    with torch.device("meta"):
        layers = layers_of(make(), plan.sparsity)
    parameters, kept = sum(layer.numel for layer in layers), sum(layer.kept for layer in layers)
    share, size = (parameters - kept) / max(parameters, 1), 2 if plan.dtype == "bf16" else 4
    how = f"an early-bird ticket (window {plan.window}, epsilon {plan.epsilon:g}, a mask every {plan.every} steps)"
    how = how if plan.pruner == "early_bird" else "magnitude"
    state = {
        "dense": dense_bytes(parameters, itemsize=size),
        "SAMO as in the dissertation": paper_bytes(parameters, share, itemsize=size),
        "SAMO here": our_bytes(parameters, share, itemsize=size),
    }
    return "\n".join(
        [
            f"{title}: {parameters:,} parameters, {plan.steps} steps on {plan.ranks} data-parallel ranks, {plan.dtype}, AdamW",
            f"pruned side: {plan.sparsity:.1%} of the weights of matrices and convolutions ({share:.2%} of all), {plan.scope} "
            f"threshold, by {how}, after step {plan.last_dense_step} at the latest",
            "model state a rank, by the memory model: "
            + ", ".join(f"{name} {_bytes(value)}" for name, value in state.items()),
            f"all-reduced a step: dense {_bytes(size * parameters)}, pruned {_bytes(size * kept)}",
        ]
    )


def results(problem: Problem, plan: Plan, sides: dict[str, Outcome]) -> dict[str, Any]:
    """Everything measured, as what JSON can hold; seconds and bytes."""
    return {
        "plan": asdict(plan),
        "model": problem.title,
        "metric": problem.metric,
        "device": torch.cuda.get_device_name() if plan.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "sides": {
            name: {**asdict(side), "final": side.validation[-1][1], "step_s": _step_seconds(side)}
            for name, side in sides.items()
        },
    }


def _step_seconds(side: Outcome) -> float:
    """Median of the steps after pruning, but the last, at which bytes are counted."""
    return statistics.median(side.seconds[(side.pruned_at or 0) : -1] or side.seconds)


def table(numbers: dict[str, Any]) -> str:
    """Both sides, and what they come to in a sentence."""
    metric, sides = numbers["metric"], numbers["sides"]
    lines = [
        f"{'':8} {'final ' + metric:>18} {'state MiB':>10} {'B/parameter':>12} {'all-reduced MiB':>16} {'step ms':>8}"
    ]
    for name, side in sides.items():
        lines.append(
            f"{name:8} {side['final']:18.4f} {side['state_bytes'] / MIB:10.2f} "
            f"{side['state_bytes'] / side['parameters']:12.3f} {side['reduced_bytes'][-1] / MIB:16.3f} {side['step_s'] * 1e3:8.1f}"
        )
    if set(sides) == {"dense", "pruned"}:
        dense, pruned = sides["dense"], sides["pruned"]
        change = f"{100 * (pruned['final'] - dense['final']):+.2f} points"
        if metric == "perplexity":
            change = f"{pruned['final'] / dense['final'] - 1:+.2%}"
        found = "the ticket was found" if pruned["ticket"] else "weights were pruned by magnitude"
        less = f"state {1 - pruned['state_bytes'] / dense['state_bytes']:.1%} less"
        if dense["reduced_bytes"][-1]:
            less += f", all-reduces {1 - pruned['reduced_bytes'][-1] / dense['reduced_bytes'][-1]:.1%} less"
        lines += ["", f"{metric} {change} at equal steps; {found} after step {pruned['pruned_at']}; {less}"]
    return "\n".join(lines)


def write(numbers: dict[str, Any], folder: Path) -> list[Path]:
    """Write results.json, table.txt, sparsity.txt and curves.png into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "results.json": json.dumps(numbers, indent=1),
        "table.txt": table(numbers),
        "sparsity.txt": numbers["sides"].get("pruned", {}).get("table", ""),
    }
    written = [folder / name for name, text in files.items() if text]
    for file in written:
        file.write_text(files[file.name] + "\n")
    _draw(numbers, folder / "curves.png")
    return [*written, folder / "curves.png"]


def _draw(numbers: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (name, side), color in zip(numbers["sides"].items(), ("tab:blue", "tab:orange"), strict=False):
        steps, values = zip(*side["validation"], strict=True)
        label = name if side["pruned_at"] is None else f"{numbers['plan']['sparsity']:.0%} pruned"
        axes.plot(steps, values, color=color, label=f"{label}: {values[-1]:.4g}")
        if side["pruned_at"]:
            axes.axvline(side["pruned_at"], color=color, linestyle=":", label=f"pruned after step {side['pruned_at']}")
    if numbers["metric"] == "perplexity":
        axes.set(yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    axes.set(xlabel="step", ylabel=f"validation {numbers['metric']}", title=numbers["model"])
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=100)
    pyplot.close(figure)


def _bytes(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count / 2**10:,.2f} KiB"
