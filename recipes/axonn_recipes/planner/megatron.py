"""Megatron's published times, which Calculon was validated with, beside what the default predicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from axonn_plugins.planner import corpus, files, machine, model
from axonn_plugins.planner.search import Constraints, search
from axonn_plugins.planner.setting import Setting
from axonn_recipes.planner.outcome import Check, Outcome, lines

VOCABULARY = 51200
"""Vocabulary of all four models, as Megatron pads it (Korthikanti et al. 2022, section 6)."""
MODELLED = {
    "as 004": Setting(),
    "whole": Setting(whole=True),
    "whole, plain attention": Setting(whole=True, fused=False),
}
"""The settings that are modelled: Megatron ran before attention was fused, and wrote its scores to memory."""
CALCULON = (0.0365, 0.0887)
"""Its mean and largest error."""


def megatron() -> Outcome:
    """Megatron's eight published times, which Calculon was validated with, beside the default's predictions."""
    rows: list[dict[str, Any]] = []
    for one in corpus.read(files.ours("corpus")["megatron"]):
        # Memory is no limit here: what ran is known.
        on = replace(machine.load(one.machine), memory=float("inf"))
        trained = model.load(one.model)
        assert isinstance(trained, model.Transformer)
        row: dict[str, Any] = {
            "model": one.model.partition("-")[2].upper(),
            "GPUs": one.gpus,
            "recomputed": "full" if one.setting.recompute else "attention alone",
            "measured": one.seconds,
        }
        for what, more in MODELLED.items():
            setting = replace(one.setting, whole=more.whole, fused=more.fused)
            given = Constraints(one.fixed)
            padded = replace(trained, vocabulary=VOCABULARY)
            found = search(on, padded, "1d", one.gpus, one.batch, "roofline", 1, given, setting).best[0].seconds
            row |= {what: found, f"error, {what}": found / one.seconds - 1}
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
