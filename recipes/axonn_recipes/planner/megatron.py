"""Megatron's published times, which Calculon was validated with, beside what the default predicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from axonn_plugins.planner import machine, model
from axonn_plugins.planner.search import Constraints, search
from axonn_plugins.planner.step import Setting
from axonn_recipes.planner.outcome import Check, Outcome, lines

TIMES = [
    ("22B", 48, 6144, 64, 8, 1, 4, 4, 1, 1.42, 1.10),
    ("175B", 96, 12288, 96, 64, 8, 64, 1, 3, 18.13, 13.75),
    ("530B", 105, 20480, 128, 280, 35, 280, 1, 3, 49.05, 37.83),
    ("1T", 128, 25600, 160, 512, 64, 512, 1, 1, 94.42, 71.49),
]
"""Model, layers, hidden, heads, GPUs, np, batch, bm, interleaved parts; seconds of a step with full recomputation, and with sequence
parallelism and recomputation of attention alone (Korthikanti et al. 2022, Table 5). TP is 8, on A100 of 80 GB, 8 a node."""
VOCABULARY = 51200
MODELLED = {
    "as 004": Setting(),
    "whole": Setting(whole=True),
    "whole, plain attention": Setting(whole=True, fused=False),
}
"""What is modelled: Megatron ran before attention was fused, and wrote its scores to memory."""
CALCULON = (0.0365, 0.0887)
"""Its mean and largest error."""


def megatron() -> Outcome:
    """Megatron's eight published times, which Calculon was validated with, beside the default's predictions."""
    # Memory is no limit here: what ran is known.
    on = replace(machine.load("a100-nvs8"), memory=float("inf"))
    rows: list[dict[str, Any]] = []
    for name, layers, hidden, heads, gpus, stages, batch, bm, parts, full, selective in TIMES:
        trained = model.Transformer(name, layers, hidden, heads, vocabulary=VOCABULARY)
        given = Constraints({"n1": 8, "np": stages, "bm": bm})
        for recompute, measured in ((True, full), (False, selective)):
            row: dict[str, Any] = {
                "model": name,
                "GPUs": gpus,
                "recomputed": "full" if recompute else "attention alone",
                "measured": measured,
            }
            for what, more in MODELLED.items():
                setting = replace(more, recompute=recompute, interleave=parts)
                found = search(on, trained, "1d", gpus, batch, "roofline", 1, given, setting).best[0].seconds
                row |= {what: found, f"error, {what}": found / measured - 1}
            rows.append(row)
    said = []
    for what in MODELLED:
        errors = [abs(one[f"error, {what}"]) for one in rows]
        said.append(f"{sum(errors) / len(errors):.1%} and {max(errors):.1%} {what}")
    check = Check(
        f"Calculon errs by {CALCULON[0]:.2%} on average, {CALCULON[1]:.2%} at most",
        f"{', '.join(said)}, always too fast",
        sum(abs(one["error, whole, plain attention"]) for one in rows) / len(rows) <= CALCULON[0],
    )
    series = {
        f"{kind}, {what}": (
            [one["GPUs"] for one in rows if one["recomputed"] == kind],
            [one[what] for one in rows if one["recomputed"] == kind],
        )
        for kind in ("full", "attention alone")
        for what in ("measured", *MODELLED)
    }
    return Outcome(rows, lines("Megatron on A100: 22B, 175B, 530B, 1T", "GPUs", "s a step", series), [check])
