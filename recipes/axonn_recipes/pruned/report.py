"""The report of both sides: a table, and the validation curves as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from axonn_plugins.observe.figures import Picture
from axonn_plugins.observe.files import put
from axonn_recipes.bench import output
from axonn_recipes.bench.output import mib, table, three
from axonn_recipes.pruned.plan import Plan
from axonn_recipes.pruned.train import Outcome, Problem
from samo.memory import dense_bytes, layers_of, our_bytes, paper_bytes


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


def text(numbers: dict[str, Any]) -> str:
    """Both sides, and what they come to in a sentence."""
    metric, sides = numbers["metric"], numbers["sides"]
    shown = table(
        {
            "": lambda named: named[0],
            f"final {metric}": lambda named: f"{named[1]['final']:.4f}",
            "state MiB": lambda named: mib(named[1]["state_bytes"], 2),
            "B/parameter": lambda named: three(named[1]["state_bytes"] / named[1]["parameters"]),
            "all-reduced MiB": lambda named: mib(named[1]["reduced_bytes"][-1], 3),
            "step ms": lambda named: f"{named[1]['step_s'] * 1e3:.1f}",
        },
        sides.items(),
    )
    lines = [shown]
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


def publish(numbers: dict[str, Any], folder: Path) -> None:
    """Print the table; write it, the numbers, the pruned side's sparsity and the curves into a folder."""
    print()
    output.publish(folder, numbers, text(numbers), {"curves.png": Picture(partial(_draw, numbers), (7, 4), 100)})
    if sparsity := numbers["sides"].get("pruned", {}).get("table"):
        file = folder / "sparsity.txt"
        put(file, sparsity + "\n")
        print(file)


def _draw(numbers: dict[str, Any], figure: Any) -> None:
    axes = figure.subplots()
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


def _bytes(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count / 2**10:,.2f} KiB"
