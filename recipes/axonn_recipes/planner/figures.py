"""The figures of 004, from the roofline model in paper mode: global batch 4096, GPT3-1T and the ViT for ERA5."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from axonn_plugins.planner import files, machine, model
from axonn_plugins.planner.collectives import Kind, seconds
from axonn_plugins.planner.report import DAY, GB
from axonn_plugins.planner.search import Constraints, Plan, search
from axonn_plugins.planner.transformer import Strategy
from axonn_plugins.planner.uncertainty import LARGE
from axonn_recipes.planner.outcome import Check, Outcome, heat, lines, of_plans, row

BATCH = 4096
GPT, VIT = "gpt3-1t", "vit-era5"
MACHINES = [f"{gpu}-nvs{domain}" for gpu in ("a100", "h200", "b200") for domain in (4, 8, 64)]
GPT_TOKENS = 1e12
VIT_SAMPLES = 40 * 365.25 * 24 * 80
"""40 years of ERA5, hourly, for 80 epochs."""


def best(
    where: machine.Machine, trained: str, strategy: Strategy, gpus: int, fixed: dict[str, int] | None = None
) -> Plan | None:
    """The best plan in paper mode; with sizes that are given, whether it fits or not."""
    on = replace(where, memory=float("inf")) if fixed else where
    found = search(on, _model(trained), strategy, gpus, BATCH, "paper", 1, Constraints(fixed or {})).best
    return found[0] if found else None  # type: ignore[return-value]


def _model(name: str) -> model.Transformer:
    trained = model.load(name)
    assert isinstance(trained, model.Transformer)
    return trained


def _given(
    title: str, where: str, trained: str, strategy: Strategy, given: list[dict[str, int]]
) -> tuple[list[str], list[Plan], str]:
    plans = [(one, best(machine.load(where), trained, strategy, 16384, one)) for one in given]
    known = [(one, plan) for one, plan in plans if plan is not None]
    labels = [chr(ord("A") + i) for i in range(len(known))]
    return labels, [plan for _, plan in known], f"{title}: {trained} on 16384 {where}"


def figure_1() -> Outcome:
    """TP against DP, PP fixed at 64."""
    given = [{"np": 64, "bm": 1, "n1": n1} for n1 in (1, 2, 4, 8, 16, 32)]
    labels, plans, title = _given("Figure 1", "b200-nvs8", GPT, "1d", given)
    least = min(plans, key=lambda plan: plan.seconds)
    got = (least.microbatches, least.n1, least.nd, least.np)
    memory = least.bytes / GB
    checks = [
        Check("local minimum at (m, nt, nd, np) = (128, 8, 32, 64)", f"{got}", got == (128, 8, 32, 64)),
        Check("there about 40 GB", f"{memory:.1f} GB", 30 <= memory <= 50),
    ]
    return of_plans(title, "configuration", labels, plans, checks)


def figure_2a() -> Outcome:
    """PP against DP, TP fixed at 8, NVS domains of 8."""
    return _figure_2("b200-nvs8", 64)


def figure_2b() -> Outcome:
    """The same with NVS domains of 64."""
    return _figure_2("b200-nvs64", 2)


def _figure_2(where: str, published: int) -> Outcome:
    given = [{"n1": 8, "bm": 1, "np": stages} for stages in (1, 2, 4, 8, 16, 32, 64, 128)]
    labels, plans, title = _given("Figure 2", where, GPT, "1d", given)
    fitting = [plan for plan in plans if plan.bytes <= machine.load(where).memory]
    least = min(fitting, key=lambda plan: plan.seconds)
    check = Check(f"least time at np = {published}", f"np = {least.np}", least.np == published)
    return of_plans(title, "configuration", labels, plans, [check])


def figure_3a() -> Outcome:
    """SUMMA's n1 against n2, at (nt, np) = (32, 1) and (8, 128), NVS domains of 8."""
    return _figure_3("b200-nvs8", (8, 1, 128))


def figure_3b() -> Outcome:
    """The same with NVS domains of 64."""
    return _figure_3("b200-nvs64", (8, 4, 1))


def _figure_3(where: str, published: tuple[int, int, int]) -> Outcome:
    given = [{"n1": n1, "n2": 32 // n1, "np": 1, "bm": 8} for n1 in (32, 16, 8, 4, 2)]
    given += [{"n1": n1, "n2": 8 // n1, "np": 128, "bm": 1} for n1 in (8, 4, 2, 1)]
    labels, plans, title = _given("Figure 3", where, GPT, "summa", given)
    least = min(plans, key=lambda plan: plan.seconds)
    got = (least.n1, least.n2, least.np)
    check = Check(f"fastest (n1, n2, np) = {published}", f"{got}", got == published)
    return of_plans(title, "configuration", labels, plans, [check])


def _scaling(title: str, where: str, trained: str, strategy: Strategy, least: int) -> tuple[Outcome, dict[int, Plan]]:
    counts = [least * 2**i for i in range(20) if least * 2**i <= 16384]
    plans = {gpus: best(machine.load(where), trained, strategy, gpus) for gpus in counts}
    known = {gpus: plan for gpus, plan in plans.items() if plan is not None}
    outcome = of_plans(
        f"{title}: {trained} on {where}", "GPUs", [str(gpus) for gpus in known], list(known.values()), []
    )
    return outcome, known


def figure_4a() -> Outcome:
    """The best configuration by number of GPUs: GPT3-1T in 1D."""
    outcome, plans = _scaling("Figure 4a", "b200-nvs8", GPT, "1d", 128)
    two, one = plans[2048], plans[1024]
    checks = [
        Check("2048 GPUs: (nNVS1, nNVSp) = (4, 2)", f"({two.v1}, {two.vp})", (two.v1, two.vp) == (4, 2)),
        Check(
            "1024 GPUs: (nNVS1, nNVSd, nNVSp) = (2, 2, 2)",
            f"({one.v1}, {one.vd}, {one.vp})",
            (one.v1, one.vd, one.vp) == (2, 2, 2),
        ),
        Check(
            "from 8192 GPUs the domain is TP's",
            f"{plans[8192].v1} and {plans[16384].v1} of 8",
            plans[8192].v1 == plans[16384].v1 == 8,
        ),
        Check(
            "most time is compute",
            f"at least {min(plan.parts['compute'] / plan.seconds for plan in plans.values()):.0%}",
            all(plan.parts["compute"] == max(plan.parts.values()) for plan in plans.values()),
        ),
    ]
    return replace(outcome, checks=checks)


def figure_4b() -> Outcome:
    """The same for the ViT in 2D."""
    outcome, plans = _scaling("Figure 4b", "b200-nvs8", VIT, "2d", 32)
    grids = [(plan.n1, plan.n2) for plan in plans.values()]
    common = max(set(grids), key=grids.count)
    check = Check(
        "(n1, n2) = (4, 4) is the most common", f"{common}, {grids.count(common)} of {len(grids)}", common == (4, 4)
    )
    return replace(outcome, checks=[check])


def figure_5a() -> Outcome:
    """Days to train GPT3-1T on 1T tokens in 1D, by number of GPUs, GPU and NVS domain."""
    outcome = _days("Figure 5a", GPT, "1d", GPT_TOKENS / 2048)
    days = {(one["machine"], one["GPUs"]): one["days"] for one in outcome.rows}
    a100, b200 = [days[f"a100-nvs{n}", 16384] for n in (4, 8, 64)], [days[f"b200-nvs{n}", 16384] for n in (4, 8, 64)]
    checks = [
        Check("O(30) days on 16K A100", f"{min(a100):.1f} to {max(a100):.1f}", 20 <= min(a100) and max(a100) <= 45),
        Check("O(3-5) days on 16K B200", f"{min(b200):.1f} to {max(b200):.1f}", 2.5 <= min(b200) and max(b200) <= 6),
    ]
    return replace(outcome, checks=checks)


def figure_5b() -> Outcome:
    """Days to train the ViT on 40 years of ERA5 in 2D."""
    return _days("Figure 5b", VIT, "2d", VIT_SAMPLES)


def _days(title: str, trained: str, strategy: Strategy, samples: float) -> Outcome:
    rows: list[dict[str, Any]] = []
    for where in MACHINES:
        for gpus in (2**i for i in range(5, 15)):
            plan = best(machine.load(where), trained, strategy, gpus)
            if plan is not None:
                days = samples / BATCH * plan.seconds / DAY
                rows.append({"machine": where, "GPUs": gpus, "days": days, **row(plan)})
    series = {
        where: (
            [one["GPUs"] for one in rows if one["machine"] == where],
            [one["days"] for one in rows if one["machine"] == where],
        )
        for where in MACHINES
    }
    return Outcome(rows, lines(f"{title}: {trained}, {strategy}", "GPUs", "days", series))


def all_gather() -> dict[str, Any]:
    """Times of an all-gather by NCCL on 32 A100: bytes, and microseconds by GPUs a node."""
    return files.read("all_gather", Path(__file__).with_name("all_gather.toml"))


def appendix_1() -> Outcome:
    """Time of an all-gather by volume on 32 A100 of Perlmutter, with 2 and 4 GPUs a node: by the formula, and as the authors measured it."""
    measured = all_gather()
    volumes, on = np.array(measured["bytes"], float), machine.load("perlmutter")
    formula = {near: np.asarray(seconds(on, Kind.GATHER, volumes, 32, near)) for near in (2, 4)}
    taken = {near: 1e-6 * np.array(measured[f"{near} a node"]) for near in (2, 4)}
    rows = [
        {
            "bytes": int(volume),
            **{f"seconds, {near} a node": float(formula[near][i]) for near in (2, 4)},
            **{f"measured seconds, {near} a node": float(taken[near][i]) for near in (2, 4)},
        }
        for i, volume in enumerate(volumes)
    ]
    series = {
        f"NVL {near}, {what}": (list(volumes), list(each[near]))
        for what, each in (("formula", formula), ("measured", taken))
        for near in (2, 4)
    }
    faster = float(formula[2][-1] / formula[4][-1])
    large = volumes >= LARGE
    off = max(float(np.abs(formula[near] / taken[near] - 1)[large].max()) for near in (2, 4))
    checks = [
        Check("more GPUs a node, smaller times", f"4 a node are {faster:.2f} times as fast", faster > 1),
        Check("the formulas agree well with what was measured", f"from 64 MB up off by {off:.1%} at most", off < 0.15),
    ]
    return Outcome(rows, lines("Appendix, Figure 1: all-gather, 32 A100", "bytes", "s", series), checks)


def appendix_2a() -> Outcome:
    """GPT3-1T in 2D: n1 against n2, at (nt, np) = (32, 1) and (8, 128), NVS domains of 64."""
    given = [{"n1": n1, "n2": 32 // n1, "np": 1, "bm": 1} for n1 in (32, 16, 8, 4, 2)]
    given += [{"n1": n1, "n2": 8 // n1, "np": 128, "bm": 1} for n1 in (8, 4, 2, 1)]
    labels, plans, title = _given("Appendix, Figure 2a", "b200-nvs64", GPT, "2d", given)
    most = max(plans, key=lambda plan: plan.bytes)
    check = Check("low PP takes a lot of memory", f"most: np = {most.np}, {most.bytes / GB:.0f} GB", most.np == 1)
    return of_plans(title, "configuration", labels, plans, [check])


def appendix_2b() -> Outcome:
    """The ViT in 2D: n1 against n2 at nt = 16, np = 1 and 16."""
    given = [{"n1": n1, "n2": 16 // n1, "np": stages, "bm": 1} for stages in (1, 16) for n1 in (16, 8, 4, 2, 1)]
    labels, plans, title = _given("Appendix, Figure 2b", "b200-nvs64", VIT, "2d", given)
    least = min(plans, key=lambda plan: plan.seconds)
    return of_plans(
        title, "configuration", labels, plans, [Check("low PP is favoured", f"np = {least.np}", least.np == 1)]
    )


def appendix_3a() -> Outcome:
    """GPT3-1T in 1D by number of GPUs, NVS domains of 64."""
    outcome, plans = _scaling("Appendix, Figure 3a", "b200-nvs64", GPT, "1d", 128)
    small = plans[16384].np
    return replace(outcome, checks=[Check("small PP at scale", f"np = {small} on 16384 GPUs", small <= 8)])


def appendix_3b() -> Outcome:
    """GPT3-1T with SUMMA by number of GPUs, NVS domains of 64."""
    outcome, plans = _scaling("Appendix, Figure 3b", "b200-nvs64", GPT, "summa", 128)
    flat = [gpus for gpus, plan in plans.items() if plan.n2 == 1]
    check = Check(
        "mostly n2 = 1, except at scale", f"n2 = 1 on {len(flat)} of {len(plans)} scales", len(flat) > len(plans) / 2
    )
    return replace(outcome, checks=[check])


def appendix_4() -> Outcome:
    """Speedup of SUMMA and 2D over 1D for GPT3-1T."""
    rows: list[dict[str, Any]] = []
    for where in MACHINES:
        for gpus in (2**i for i in range(7, 15)):
            plans = {strategy: best(machine.load(where), GPT, strategy, gpus) for strategy in ("1d", "2d", "summa")}  # type: ignore[arg-type]
            one = plans["1d"]
            if one is None:
                continue
            ratios = {
                f"{name} over 1d": one.seconds / plan.seconds if plan else None
                for name, plan in plans.items()
                if name != "1d"
            }
            rows.append({"machine": where, "GPUs": gpus, **ratios})
    series = {
        f"{where}, {name}": (
            [one["GPUs"] for one in rows if one["machine"] == where],
            [one[f"{name} over 1d"] for one in rows if one["machine"] == where],
        )
        for name in ("2d", "summa")
        for where in MACHINES
    }
    gains = [value for one in rows for key, value in one.items() if key.endswith("1d") and value]
    middle = float(np.median(gains))
    check = Check(
        "generally 5 to 10 % faster", f"median {middle - 1:.1%}, most {max(gains) - 1:.1%}", 1.0 <= middle <= 1.1
    )
    return Outcome(rows, lines("Appendix, Figure 4: speedup over 1D", "GPUs", "speedup", series, False), [check])


def _heat(title: str, trained: str, strategy: Strategy, x: tuple[str, ...], y: tuple[str, ...]) -> Outcome:
    base = machine.load("b200-nvs8")
    rows: list[dict[str, Any]] = []
    for across in (0.25, 0.5, 1.0, 2.0, 4.0):
        for up in (0.25, 0.5, 1.0, 2.0, 4.0):
            scaled = {key: across * getattr(base, key) for key in x} | {key: up * getattr(base, key) for key in y}
            plan = best(replace(base, **scaled), trained, strategy, 8192)
            samples = GPT_TOKENS / 2048 if trained == GPT else VIT_SAMPLES
            days = None if plan is None else samples / BATCH * plan.seconds / DAY
            rows.append({" and ".join(x): across, " and ".join(y): up, "days": days})
    name = f"{title}: {trained} on 8192 GPUs, times B200's"
    return Outcome(rows, heat(name, " and ".join(x), " and ".join(y), rows, "days"))


def appendix_5a() -> Outcome:
    """GPT3-1T by flop rate, and by memory's size and bandwidth together."""
    return _heat("Appendix, Figure 5a", GPT, "1d", ("memory", "memory_bandwidth"), ("tensor", "vector"))


def appendix_5b() -> Outcome:
    """The same for the ViT in 2D."""
    return _heat("Appendix, Figure 5b", VIT, "2d", ("memory", "memory_bandwidth"), ("tensor", "vector"))


def appendix_6a() -> Outcome:
    """GPT3-1T by memory's size and bandwidth apart."""
    return _heat("Appendix, Figure 6a", GPT, "1d", ("memory",), ("memory_bandwidth",))


def appendix_6b() -> Outcome:
    """The same for the ViT in 2D."""
    return _heat("Appendix, Figure 6b", VIT, "2d", ("memory",), ("memory_bandwidth",))
