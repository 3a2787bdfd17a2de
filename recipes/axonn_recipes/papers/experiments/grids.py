"""4D grids at the scale of 000's chapter 5, 002 and 003: weak and strong scaling, overlap, ranks, other frameworks, by the planner.

Activations are checkpointed, as in all of the papers' runs, and there are no stages. The model is calibrated on half of the planner's
corpus, in which are some of these runs (its README). Where the text gives no batch it is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from axonn_plugins.observe.figures import Picture
from axonn_plugins.planner import axonn, fourd, machine, model
from axonn_plugins.planner.axonn import Grids, model_flops
from axonn_plugins.planner.search import Constraints, GridPlan
from axonn_plugins.planner.setting import Setting
from axonn_plugins.planner.transformer import Mode
from axonn_recipes.papers.data import Value
from axonn_recipes.papers.found import MODEL, Experiment, Found
from axonn_recipes.planner.dissertation import TABLE_5_2, time_to_solution
from axonn_recipes.planner.outcome import lines

MODE: Mode = "calibrated"
"""Mode of the planner's model, its default."""
BATCH = 8192
"""Samples of 2048 positions: 16.8 million tokens (002, Table I)."""
CHECKPOINTED = Setting(recompute=True)
EXPOSED = Setting(recompute=True, overlap=frozenset())
ROOM = 36e9
"""Bytes for model state on Perlmutter's GPUs of 40 GB."""
EFFICIENCIES = {
    ("alps", 6144): "Alps, 6144 GPUs beside 1024",
    ("frontier", 8192): "Frontier, 8192 GCDs beside 512",
    ("frontier", 16384): "Frontier, 16384 GCDs beside 512",
    ("frontier", 32768): "Frontier, 32768 GCDs beside 512",
}


def best(
    where: str,
    trained: str,
    gpus: int,
    batch: int,
    setting: Setting = CHECKPOINTED,
    fixed: Mapping[str, int] | None = None,
) -> GridPlan:
    """The fastest grid, of those with the given sizes."""
    return _fastest(machine.load(where), model.load(trained), gpus, batch, setting, fixed)


def _fastest(
    on: machine.Machine, of: model.Model, gpus: int, batch: int, setting: Setting, fixed: Mapping[str, int] | None
) -> GridPlan:
    stages = {"stages": 1} if isinstance(of, model.Transformer) else {}  # the papers' grids have none
    found = fourd.search(on, of, gpus, batch, MODE, 1, Constraints({**stages, **(fixed or {})}), setting).best
    if not found:
        raise LookupError(f"no grid of {gpus} {on.name} holds {of.name} with {fixed}")
    assert isinstance(found[0], GridPlan)
    return found[0]


def sizes(plan: GridPlan) -> dict[str, int]:
    """Its grid, as what is given to a search."""
    return {axis: getattr(plan, axis) for axis in ("gx", "gy", "gz", "gdata")}


def less(ours: float, theirs: float) -> float:
    """Percent of their time that ours takes less."""
    return 100 * (1 - ours / theirs)


def weak_scaling(folder: Path) -> Found:
    """Sustained flop/s of the fifteen runs of 000's Table 5.2: a batch of 16.8M tokens on every number of GPUs."""
    values: dict[str, Value] = {}
    rates: dict[tuple[str, int], float] = {}
    seconds: dict[str, tuple[list[int], list[float]]] = {}
    for where, gpus, size, *_ in TABLE_5_2:
        plan, on = best(where, f"gpt-{size}", gpus, BATCH), machine.load(where)
        rate = model_flops(model.load(f"gpt-{size}"), BATCH) / plan.seconds
        name = f"{where.capitalize()} {gpus}, {size.upper()}"
        values[f"{name}: Pflop/s"] = rate / 1e15
        values[f"{name}: % of advertised peak"] = 100 * rate / gpus / on.tensor
        values[f"{name}: % of empirical peak"] = 100 * rate / gpus / (on.sustained or on.tensor)
        rates[where, gpus] = rate / gpus
        counts, times = seconds.setdefault(where, ([], []))
        counts.append(gpus)
        times.append(plan.seconds)
    first = {"alps": 1024, "frontier": 512}
    for (where, gpus), what in EFFICIENCIES.items():
        values[f"efficiency on {what}"] = 100 * rates[where, gpus] / rates[where, first[where]]
    return Found(values, {"seconds": lines("Weak scaling, predicted", "GPUs or GCDs", "s a batch", seconds)})


def days(folder: Path) -> Found:
    """Days for 2T tokens on Frontier (000, Figure 5.7)."""
    outcome = time_to_solution()
    at = {(one["model"], one["GCDs"]): one["days"] for one in outcome.rows}
    values: dict[str, Value] = {
        "80B on 128 GCDs": at["gpt-80b", 128] / 30.4,
        "80B on 8192 GCDs": at["gpt-80b", 8192],
        "640B on 512 GCDs": at["gpt-640b", 512] / 365,
        "640B on 8192 GCDs": at["gpt-640b", 8192] / 30.4,
        "640B: 512 over 8192 GCDs": at["gpt-640b", 512] / at["gpt-640b", 8192],
        "80B at 571.4 Pflop/s, by the formula": model_flops(model.load("gpt-80b"), 1) / 2048 * 2e12 / 571.4e15 / 86400,
    }
    return Found(values, {"days": outcome.picture})


def ablation(folder: Path) -> Found:
    """Figure 5.5 (right): 1D in nodes with sharded data parallelism, the performance model's grid, and overlap, on 512 to 8192 GCDs."""
    gained: list[float] = []
    hidden: dict[str, float] = {}
    for _, gpus, size, *_ in (row for row in TABLE_5_2 if row[0] == "frontier" and row[1] <= 8192):
        name = f"gpt-{size}"
        baseline = best("frontier", name, gpus, BATCH, EXPOSED, {"gx": 8, "gy": 1}).seconds
        chosen = fourd.search(machine.load("frontier"), model.load(name), gpus, BATCH, "paper", 10).best
        plans = [
            best("frontier", name, gpus, BATCH, EXPOSED, sizes(one)) for one in chosen if isinstance(one, GridPlan)
        ]
        modelled = min(plans, key=lambda one: one.seconds)
        gained.append(less(modelled.seconds, baseline))
        hidden[size] = less(
            best("frontier", name, gpus, BATCH, CHECKPOINTED, sizes(modelled)).seconds, modelled.seconds
        )
    values: dict[str, Value] = {
        "performance model over 1D + HSDP, least": min(gained),
        "performance model over 1D + HSDP, most": max(gained),
        "overlap, 80B on 8192 GCDs": hidden["80b"],
        "overlap gains most for the largest model": max(hidden, key=lambda size: hidden[size]) == "80b",
    }
    return Found(values)


def overlap(folder: Path) -> Found:
    """Figure 5.4: overlaps one after another, 80B on 8192 GCDs of Frontier."""
    plan = best("frontier", "gpt-80b", 8192, BATCH, EXPOSED)
    times = _stages("frontier", "gpt-80b", 8192, BATCH, plan)
    values: dict[str, Value] = {"80B on 8192 GCDs: all overlaps": less(times["+OAG"], times["no overlap"])}
    return Found(values, {"stages": _bars("80B on 8192 GCDs, predicted", times)})


def running_example(folder: Path) -> Found:
    """003's Figure 3: 20B, 16 samples of 2048 positions, on 16 GPUs of Perlmutter, on the fastest grid without overlap that splits over x and z."""
    axes = [{"gx": gx, "gz": gz} for gx in (2, 4, 8) for gz in (2, 4, 8) if gx * gz <= 16]
    plan = min((best("perlmutter", "gpt-20b", 16, 16, EXPOSED, fixed) for fixed in axes), key=lambda one: one.seconds)
    times = _stages("perlmutter", "gpt-20b", 16, 16, plan)
    steps = list(times.values())
    names = ("all-reduces", "reduce-scatters", "all-gathers", "kept weights")
    values: dict[str, Value] = {
        f"overlap of {what}" if what != names[-1] else what: less(after, before)
        for what, before, after in zip(names, steps, steps[1:], strict=False)
    }
    values["all four"] = less(steps[-1], steps[0])
    grid = ", ".join(f"{axis} = {size}" for axis, size in sizes(plan).items())
    return Found(values, {"stages": _bars("20B on 16 GPUs, predicted", times)}, note=f"The grid: {grid}.")


def _stages(where: str, name: str, gpus: int, batch: int, plan: GridPlan) -> dict[str, float]:
    """Seconds of a grid with one overlap after another, and with gathered weights kept; memory is no limit."""
    on, given = machine.load(where), {**sizes(plan), "m": plan.microbatches}
    settings = {
        "no overlap": EXPOSED,
        "+OAR": Setting(recompute=True, overlap=frozenset({"OAR"})),
        "+ORS": Setting(recompute=True, overlap=frozenset({"OAR", "ORS"})),
        "+OAG": CHECKPOINTED,
        "+kept": Setting(recompute=True, keep_gathered=True),
    }
    room = replace(on, memory=float("inf"))
    return {
        stage: _fastest(room, model.load(name), gpus, batch, setting, given).seconds
        for stage, setting in settings.items()
    }


def _bars(title: str, times: Mapping[str, float]) -> Picture:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.bar(list(times), list(times.values()))
        axes.set_ylabel("s a batch")
        axes.set_title(title)

    return Picture(draw, (5, 3.5))


def placement(folder: Path) -> Found:
    """003's Figure 7: where the placement-agnostic model ranks the grid that the placement-aware one has first, 20B on 32 GPUs."""
    on, trained, gpus = machine.load("perlmutter"), model.load("gpt-20b"), 32
    at = axonn.grids(trained, gpus, gpus)
    at = at.take(axonn.state_bytes(trained, at) <= ROOM)
    full = replace(on, bandwidth_efficiency=1.0)
    times = {aware: axonn.communication(full, trained, at, gpus, aware=aware).total for aware in (True, False)}
    order = {aware: axonn.ranked(at, seconds).tolist() for aware, seconds in times.items()}
    first = order[True][0]
    series = {
        f"placement-{'aware' if aware else 'agnostic'}": (
            list(range(1, len(at) + 1)),
            [times[True][place] for place in order[aware]],
        )
        for aware in (True, False)
    }
    values: dict[str, Value] = {"place of the best grid, agnostic": order[False].index(first) + 1}
    note = f"The placement-aware model's first grid, {_shown(at, first)}, stands for the one that was fastest when measured."
    return Found(values, {"ranks": lines("Grids by rank", "rank", "s of communication, aware", series)}, note=note)


def _shown(at: Grids, place: int) -> str:
    return str(tuple(int(axis[place]) for axis in at.axes))


EXPERIMENTS = {
    "grids_weak_scaling": Experiment(weak_scaling, MODEL, 3),
    "grids_days": Experiment(days, MODEL, 3),
    "grids_ablation": Experiment(ablation, MODEL, 5),
    "grids_overlap": Experiment(overlap, MODEL, 1),
    "grids_running_example": Experiment(running_example, MODEL, 1),
    "grids_placement": Experiment(placement, MODEL, 1),
}
