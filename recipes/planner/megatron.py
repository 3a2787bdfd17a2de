"""Megatron's published times, which Calculon was validated with, beside what the default predicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plugins.planner import machine, model
from plugins.planner.search import Constraints, search
from plugins.planner.step import Setting
from recipes.planner.outcome import Check, Outcome, lines

TIMES = [
    ("22B", 48, 6144, 64, 8, 1, 4, 4, 1, 1.42, 1.10),
    ("175B", 96, 12288, 96, 64, 8, 64, 1, 3, 18.13, 13.75),
    ("530B", 105, 20480, 128, 280, 35, 280, 1, 3, 49.05, 37.83),
    ("1T", 128, 25600, 160, 512, 64, 512, 1, 1, 94.42, 71.49),
]
"""Model, layers, hidden, heads, GPUs, np, batch, bm, interleaved parts; seconds of a step with full recomputation, and with sequence
parallelism and recomputation of attention alone (Korthikanti et al. 2022, Table 5). TP is 8, on A100 of 80 GB, 8 a node."""
CALCULON = (0.0365, 0.0887)
"""Its mean and largest error."""


def megatron() -> Outcome:
    """Megatron's eight published times, which Calculon was validated with, beside the default's predictions."""
    # Memory is no limit here: what ran is known.
    on = replace(machine.load("a100-nvs8"), memory=float("inf"))
    rows: list[dict[str, Any]] = []
    for name, layers, hidden, heads, gpus, stages, batch, bm, parts, full, selective in TIMES:
        trained = model.Transformer(name, layers, hidden, heads)
        given = Constraints({"n1": 8, "np": stages, "bm": bm})
        # Recomputing attention alone is what fused attention does anyway.
        for recompute, measured in ((True, full), (False, selective)):
            setting = Setting(recompute=recompute, interleave=parts)
            found = search(on, trained, "1d", gpus, batch, "default", 1, given, setting).best[0].seconds
            kind = "full" if recompute else "attention alone"
            rows.append(
                {
                    "model": name,
                    "GPUs": gpus,
                    "recomputed": kind,
                    "measured": measured,
                    "predicted": found,
                    "error": found / measured - 1,
                }
            )
    errors = [abs(one["error"]) for one in rows]
    mean = sum(errors) / len(errors)
    check = Check(
        f"Calculon errs by {CALCULON[0]:.2%} on average, {CALCULON[1]:.2%} at most",
        f"{mean:.1%} and {max(errors):.1%}, always too fast: 80 % of the peak for any matrix",
        mean <= CALCULON[0],
    )
    series = {
        f"{kind}, {what}": (
            [one["GPUs"] for one in rows if one["recomputed"] == kind],
            [one[what] for one in rows if one["recomputed"] == kind],
        )
        for kind in ("full", "attention alone")
        for what in ("measured", "predicted")
    }
    return Outcome(rows, lines("Megatron on A100: 22B, 175B, 530B, 1T", "GPUs", "s a step", series), [check])
