"""The report of both sides: a table, and the validation curves as in Figure 7.7."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from axonn_plugins.observe.figures import Picture
from axonn_plugins.ted import memory_report
from axonn_recipes.bench.numbers import worst
from axonn_recipes.bench.output import mib, ms, table
from axonn_recipes.ted_moe.settings import Settings
from axonn_recipes.ted_moe.sides import ALLOCATING_STEP, Outcome
from ted_moe import memory

NAMES = {"deepspeed": "DeepSpeed-MoE", "ted": "TED"}
ROUNDING = 1e-6
"""Relative difference of losses that are the same but for float32's rounding."""
EXPERTS = (4, 8, 16, 32, 64, 128)
"""The numbers of section 7.4.2."""
GPUS = {
    "V100, 16 GB": 16e9,
    "V100, 32 GB": 32e9,
    "A100, 40 GB": 40e9,
    "A100, 80 GB": 80e9,
    "H200, 141 GB": 141e9,
}


def described(settings: Settings) -> str:
    """The run in words."""
    m, degrees = settings.model, settings.degrees
    micro = settings.batch // settings.micro_batch
    return "\n".join(
        [
            f"GPT of {m.layers} blocks, hidden {m.hidden}, {m.heads} heads; {settings.experts} experts in every second block, "
            f"top-{settings.k} ({settings.source})",
            f"{settings.steps} steps of {settings.batch} x {m.context} tokens in {micro} microbatches, {settings.dtype}, AdamW, ZeRO-1, "
            f"activation checkpointing, on {settings.ranks} ranks",
            f"TED: tensor {degrees.tensor} x expert {degrees.expert} x data {degrees.data}, {degrees.shared_data} ranks read data; "
            f"DeepSpeed-MoE: expert {degrees.expert} x data {settings.ranks // degrees.expert}, {settings.ranks} read data",
        ]
    )


def needed(settings: Settings) -> str:
    """Bytes a GPU of both sides in mixed precision: by part, and in all by number of experts."""
    tokens = settings.micro_batch * settings.model.context
    lines = [
        memory_report.configuration("base model", settings.base, settings.experts, settings.degrees, tokens, None),
        "",
    ]
    lines.append(
        f"{'experts':>7}{'on ranks':>10}{'parameters':>14}{'TED, GB a GPU':>30}{'DeepSpeed-MoE, GB a GPU':>30}"
    )
    for experts in sorted({*EXPERTS, settings.experts}):
        one = replace(settings, experts=experts, expert=math.gcd(experts, settings.ranks // settings.tensor))
        sizes = memory_report.totals(one.base, experts, one.degrees, tokens)
        count = memory.parameters(one.base, experts).total
        cells = [f"{size / 1e9:.2f}: {_smallest(size)}" for size in sizes]
        lines.append(f"{experts:>7}{one.expert:>10}{count / 1e9:>13.2f}B" + "".join(f"{cell:>30}" for cell in cells))
    return "\n".join(lines)


def _smallest(size: float) -> str:
    """The smallest GPU of `GPUS` that holds so many bytes."""
    return next((gpu for gpu, held in GPUS.items() if held >= size), "no GPU here")


def results(settings: Settings, sides: dict[str, Outcome]) -> dict[str, Any]:
    """Everything measured, as what JSON can hold; seconds and bytes."""
    numbers: dict[str, Any] = {
        "settings": asdict(settings),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "sides": {
            name: {**asdict(side), "final": side.validation[-1][1], "step_s": _step_seconds(side)}
            for name, side in sides.items()
        },
    }
    if len(sides) == len(NAMES):
        stock, ted = sides["deepspeed"], sides["ted"]
        numbers["differences"] = {
            "losses": _differences(stock.losses, ted.losses),
            "validation": _differences([v for _, v in stock.validation], [v for _, v in ted.validation]),
        }
    return numbers


def _differences(wanted: list[float], found: list[float]) -> list[float]:
    return [abs(a - b) / abs(a) for a, b in zip(wanted, found, strict=True)]


def _step_seconds(side: Outcome) -> float:
    return statistics.median(side.seconds[ALLOCATING_STEP:] or side.seconds)


def text(numbers: dict[str, Any]) -> str:
    """Both sides, and how far apart they are."""
    shown = table(
        {
            "": lambda named: NAMES[named[0]],
            "validation loss": lambda named: f"{named[1]['final']:.6f}",
            "step ms": lambda named: ms(named[1]["step_s"]),
            "all-to-alls": lambda named: named[1]["exchanges"][0],
            "MiB in them": lambda named: mib(named[1]["exchanges"][1], 3),
            "MiB sent": lambda named: mib(named[1]["sent"], 3),
            "state MiB": lambda named: mib(named[1]["state_bytes"], 3),
            "step's MiB": lambda named: mib(named[1]["allocated"], 3),
        },
        numbers["sides"].items(),
    )
    lines = [shown]
    if "differences" in numbers:
        losses, validation = numbers["differences"]["losses"], numbers["differences"]["validation"]
        most = worst(losses)
        exact = next((step for step, difference in enumerate(losses) if not difference <= ROUNDING), len(losses))
        lines += [
            "",
            f"largest relative difference: of training losses {losses[most]:.2e}, at step {most + 1} of {len(losses)}; "
            f"of validation losses {validation[worst(validation)]:.2e}; up to step {exact} training losses agree to {ROUNDING:g}",
        ]
    return "\n".join(lines)


def pictures(numbers: dict[str, Any]) -> dict[str, Picture]:
    """The validation curves."""
    return {"curves.png": Picture(partial(_draw, numbers), (7, 4), 100)}


def _draw(numbers: dict[str, Any], figure: Any) -> None:
    settings, axes = numbers["settings"], figure.subplots()
    for (name, side), style in zip(numbers["sides"].items(), ("-", "o"), strict=False):
        steps, values = zip(*side["validation"], strict=True)
        axes.plot(steps, values, style, markersize=4, label=f"{NAMES[name]}: {values[-1]:.4f}")
    degrees = f"tensor {settings['tensor']} x expert {settings['expert']} on {settings['ranks']} ranks"
    axes.set(xlabel="step", ylabel="validation loss", title=f"{settings['experts']} experts; TED: {degrees}")
    axes.grid(alpha=0.3)
    axes.legend()
