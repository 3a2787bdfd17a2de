"""Numbers of chapter 5 of the dissertation from models and formulas: ranks, percentages of peak, time to solution."""

from __future__ import annotations

from typing import Any

from axonn_plugins.planner import corpus, files, fourd, machine, model
from axonn_plugins.planner.axonn import model_flops
from axonn_plugins.planner.report import DAY
from axonn_plugins.planner.setting import Setting
from axonn_recipes.papers.data import load, select
from axonn_recipes.planner.outcome import Check, Outcome, lines

TABLE_5_2 = [
    (one.machine, one.gpus, one.model.removeprefix("gpt-"), one.value)
    for one in corpus.read(files.ours("corpus")["gordon_bell"])
]
"""Machine, GPUs, model and Pflop/s."""
TOKENS = 2e12
DAYS_OFF = 0.25
"""Share by which predicted days may miss what was published."""


def ranks() -> Outcome:
    """Grids as Figure 5.2 ranks them: GPT-20B on 32 and GPT-40B on 64 GPUs of Perlmutter."""
    rows: list[dict[str, Any]] = []
    for name, gpus in (("gpt-20b", 32), ("gpt-40b", 64)):
        trained = model.load(name)
        assert isinstance(trained, model.Transformer)
        found = fourd.search(machine.load("perlmutter"), trained, gpus, gpus, "paper", top=10**6).best
        rows += [
            {"model": name, "rank": rank, **plan.sizes, "seconds": plan.seconds} for rank, plan in enumerate(found, 1)
        ]
    series = {
        name: (
            [one["rank"] for one in rows if one["model"] == name],
            [one["seconds"] for one in rows if one["model"] == name],
        )
        for name in ("gpt-20b", "gpt-40b")
    }
    first = rows[0]
    check = Check(
        "20B: communication of (1, 1, 32, 1) takes 0.765 s and is first",
        f"({first['gx']}, {first['gy']}, {first['gz']}, {first['gdata']}), {first['seconds']:.3f} s",
        first["gz"] == 32 and round(first["seconds"], 3) == 0.765,
    )
    return Outcome(rows, lines("Figure 5.2: ranks by the model", "rank", "s of communication", series), [check])


def table_5_2() -> Outcome:
    """Percentages of peak from Pflop/s."""
    rows: list[dict[str, Any]] = []
    largest = 0.0
    (published,) = select(load(), "000 tab 5.2")
    percents = {number.what: number.published for number in published.numbers}
    for where, gpus, size, rate in TABLE_5_2:
        on, name = machine.load(where), f"{where.capitalize()} {gpus}, {size.upper()}"
        advertised, empirical = (percents[f"{name}: % of {peak} peak"] for peak in ("advertised", "empirical"))
        assert isinstance(advertised, int | float) and isinstance(empirical, int | float)
        ours = [100 * rate * 1e15 / gpus / peak for peak in (on.tensor, on.sustained or on.tensor)]
        rows.append(
            {
                "machine": where,
                "GPUs": gpus,
                "model": size,
                "Pflop/s": rate,
                "% of advertised": round(ours[0], 1),
                "published": advertised,
                "% of empirical": round(ours[1], 1),
                "published, empirical": empirical,
            }
        )
        largest = max(largest, abs(ours[0] - advertised), abs(ours[1] - empirical))
    series = {
        where: (
            [one["GPUs"] for one in rows if one["machine"] == where],
            [one["% of advertised"] for one in rows if one["machine"] == where],
        )
        for where in ("perlmutter", "frontier", "alps")
    }
    check = Check("Table 5.2", f"differs by {largest:.2f} points at most", largest < 0.25)
    return Outcome(rows, lines("Table 5.2", "GPUs", "% of advertised peak", series, False), [check])


def time_to_solution() -> Outcome:
    """Days to train GPT-80B and GPT-640B on 2T tokens on Frontier, as 4D grids with recomputation are predicted to take."""
    rows: list[dict[str, Any]] = []
    published = {
        ("gpt-80b", 128): 50 * 30.4,
        ("gpt-80b", 8192): 25.5,
        ("gpt-640b", 512): 14 * 365,
        ("gpt-640b", 8192): 15 * 30.4,
    }
    batch = 8192
    for name, least in (("gpt-80b", 128), ("gpt-640b", 512)):
        trained = model.load(name)
        assert isinstance(trained, model.Transformer)
        for gpus in (least * 2**i for i in range(7) if least * 2**i <= 8192):
            found = fourd.search(
                machine.load("frontier"), trained, gpus, batch, "roofline", 1, None, Setting(recompute=True)
            ).best
            days = TOKENS / (batch * trained.sequence) * found[0].seconds / DAY if found else None
            rows.append({"model": name, "GCDs": gpus, "days": days, "published": published.get((name, gpus))})
    series = {
        name: (
            [one["GCDs"] for one in rows if one["model"] == name and one["days"]],
            [one["days"] for one in rows if one["model"] == name and one["days"]],
        )
        for name in ("gpt-80b", "gpt-640b")
    }
    trained = model.load("gpt-80b")
    assert isinstance(trained, model.Transformer)
    formula = model_flops(trained, 1) / trained.sequence * TOKENS / 571.4e15 / DAY
    checks = [Check("80B at 571.4 Pflop/s: 25.5 days", f"{formula:.1f} days by the formula", round(formula, 1) == 25.5)]
    checks += [
        Check(
            f"{one['model']} on {one['GCDs']}: {one['published']:.4g} days",
            f"{one['days']:.4g} predicted",
            abs(one["days"] / one["published"] - 1) <= DAYS_OFF,
        )
        for one in rows
        if one["published"] and one["days"]
    ]
    return Outcome(rows, lines("Figure 5.7: 2T tokens on Frontier", "GCDs", "days", series), checks)
