"""000's chapter 7 at its scale: TED on Summit by the roofline model, and its memory by the chapter's formulas.

The baseline has neither duplicate token dropping nor communication-aware checkpointing. Tensor degrees are the text's: 1, 2, 4 and 8 for
base models of 1.3B, 2.7B, 6.7B and 13B. A node is taken as a domain of four of its GPUs, since six divide no power of two. Microbatches
are one sample. The numbers of experts in Figure 7.8 are in the picture alone: one for four GPUs is taken, as in Figure 7.5.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from axonn_plugins.planner import machine, model
from axonn_plugins.planner.axonn import model_flops
from axonn_plugins.planner.experts import exchange_seconds, share
from axonn_plugins.planner.search import Constraints, Plan, search
from axonn_plugins.planner.setting import Setting
from axonn_plugins.planner.transformer import local
from axonn_plugins.ted import memory_report
from axonn_recipes.papers.data import Value
from axonn_recipes.papers.experiments.grids import less
from axonn_recipes.papers.found import COUNTED, MODEL, Experiment, Found
from axonn_recipes.planner.outcome import lines
from ted_moe.memory import TABLE_4_1, TILE, Degrees, parameters, step_bytes, stock_step_bytes

SUMMIT = replace(machine.load("summit-nvs4"), memory=float("inf"))
BASES = {
    "1.3B": ("gpt3-xl", 512, 1),
    "2.7B": ("gpt3-2.7b", 512, 2),
    "6.7B": ("gpt3-6.7b", 1024, 4),
    "13B": ("gpt3-13b", 2048, 8),
}
"""Model, batch and tensor degree (Table 4.1, section 7.4.3)."""
BASELINE, DROPPING, BOTH = (False, False), (True, False), (True, True)
"""Duplicate token dropping, communication-aware checkpointing."""


def _model(name: str) -> model.Transformer:
    found = model.load(BASES[name][0])
    assert isinstance(found, model.Transformer)
    return found


def _setting(experts: int, how: tuple[bool, bool]) -> Setting:
    return Setting(recompute=True, experts=experts, dropping=how[0], stashing=how[1])


@cache
def step(name: str, gpus: int, experts: int, how: tuple[bool, bool]) -> Plan:
    """A step of a base model with experts."""
    _, batch, tensor = BASES[name]
    fixed = Constraints({"n1": tensor, "np": 1, "bm": 1})
    plan = search(SUMMIT, _model(name), "1d", gpus, batch, "roofline", 1, fixed, _setting(experts, how)).best[0]
    assert isinstance(plan, Plan)
    return plan


def all_to_all(name: str, plan: Plan, experts: int, how: tuple[bool, bool]) -> float:
    """Seconds of a step's all-to-alls: forward, backward, and again forward where it is recomputed without its stash."""
    sizes = [np.array([float(size)]) for size in (plan.n1, 1, plan.bm, 1)]
    size = local(_model(name), "1d", "roofline", *sizes)
    data = (np.array([plan.nd]), np.array([plan.vd]))
    lies = share(_model(name), "1d", size, data, data, experts)
    once = exchange_seconds(SUMMIT, _model(name), "1d", size, lies, how[0])
    return float(np.asarray(once).item()) * _model(name).layers * plan.microbatches * (2 if how[1] else 3)


def saved(name: str, gpus: int, experts: int) -> float:
    """Percent of the baseline's time that both optimizations save."""
    return less(step(name, gpus, experts, BOTH).seconds, step(name, gpus, experts, BASELINE).seconds)


def ablation(folder: Path) -> Found:
    """Figure 7.5: 6.7B with 32 experts on 128 GPUs."""
    plans = {how: step("6.7B", 128, 32, how) for how in (BASELINE, DROPPING, BOTH)}
    exchanged = {how: all_to_all("6.7B", plan, 32, how) for how, plan in plans.items()}
    reduced = {how: plan.parts["tensor"] - exchanged[how] for how, plan in plans.items()}
    values: dict[str, Value] = {
        "all-to-alls, share of the baseline": 100 * exchanged[BASELINE] / plans[BASELINE].seconds,
        "dropping: all-to-all time": less(exchanged[DROPPING], exchanged[BASELINE]),
        "dropping: batch time": less(plans[DROPPING].seconds, plans[BASELINE].seconds),
        "both: all-to-all time": less(exchanged[BOTH], exchanged[BASELINE]),
        "both: all-reduce time": less(reduced[BOTH], reduced[BASELINE]),
        "both: batch time": less(plans[BOTH].seconds, plans[BASELINE].seconds),
    }
    return Found(values)


def strong_scaling(folder: Path) -> Found:
    """Figures 7.8 and 7.10: 32 to 256 GPUs, with an expert for four GPUs and with four experts."""
    values: dict[str, Value] = {}
    pictures = {}
    counts = (32, 64, 128, 256)
    for what, experts_of in (("growing", lambda gpus: gpus // 4), ("4 experts", lambda gpus: 4)):
        for name in ("1.3B", "2.7B", "6.7B"):
            gains = [saved(name, gpus, experts_of(gpus)) for gpus in counts]
            values |= {f"{name}, {what}: least": min(gains), f"{name}, {what}: most": max(gains)}
        series = {
            f"{name}{', baseline' if how == BASELINE else ''}": (
                list(counts),
                [step(name, gpus, experts_of(gpus), how).seconds for gpus in counts],
            )
            for name in ("1.3B", "2.7B", "6.7B")
            for how in (BASELINE, BOTH)
        }
        pictures[what.replace(" ", "_")] = lines(f"TED on Summit, {what}, predicted", "GPUs", "s a batch", series)
    return Found(values, pictures)


def weak_scaling(folder: Path) -> Found:
    """Figure 7.11 and Table 7.1: 16 experts, 1.3B on 32 to 13B on 256 GPUs."""
    values: dict[str, Value] = {}
    counts = (32, 64, 128, 256)
    for name, gpus in zip(BASES, counts, strict=True):
        flops = model_flops(_model(name), BASES[name][1])
        values[f"{name} on {gpus} GPUs"] = 100 * flops / step(name, gpus, 16, BOTH).seconds / gpus / SUMMIT.tensor
        values[f"{name}: saved"] = saved(name, gpus, 16)
    series = {
        what: (list(counts), [step(name, gpus, 16, how).seconds for name, gpus in zip(BASES, counts, strict=True)])
        for what, how in (("baseline", BASELINE), ("DTD and CAC", BOTH))
    }
    return Found(values, {"seconds": lines("TED with 16 experts on Summit, predicted", "GPUs", "s a batch", series)})


def optimizer_step(folder: Path) -> Found:
    """Figure 7.4: what the optimizer's step needs besides, 2.7B with 32 experts on 32 GPUs."""
    degrees = Degrees(tensor=1, expert=32, data=1)
    here = parameters(TABLE_4_1["GPT-3-2.7B"], 32, degrees)
    values: dict[str, Value] = {
        "spike, a group at a time": step_bytes(here, degrees) / 1e9,
        "spike, tiled": step_bytes(here, degrees, TILE) / 1e9,
        "spike of stock DeepSpeed, in groups": stock_step_bytes(here, degrees) / 1e9,
        "saved by tiles": (step_bytes(here, degrees) - step_bytes(here, degrees, TILE)) / 1e9,
    }
    return Found(values)


def largest(folder: Path) -> Found:
    """Figure 7.9: the largest MoE by GPUs, beside DeepSpeed-MoE's, by equation 7.5."""
    rows = memory_report.search((32, 64, 128, 256, 512), (4, 8, 16, 32, 64, 128), 16e9, 6)
    ratios = [one.ted.parameters / one.stock.parameters for one in rows if one.ted and one.stock]
    values: dict[str, Value] = {
        "TED's over DeepSpeed-MoE's, least": min(ratios),
        "TED's over DeepSpeed-MoE's, most": max(ratios),
        "the ratio grows with GPUs": ratios == sorted(ratios),
    }
    return Found(values, {"largest": memory_report.picture(rows)})


EXPERIMENTS = {
    "mixtures_ablation": Experiment(ablation, MODEL, 1),
    "mixtures_strong": Experiment(strong_scaling, MODEL, 3),
    "mixtures_weak": Experiment(weak_scaling, MODEL, 1),
    "mixtures_step": Experiment(optimizer_step, COUNTED, 1),
    "mixtures_largest": Experiment(largest, COUNTED, 2),
}
