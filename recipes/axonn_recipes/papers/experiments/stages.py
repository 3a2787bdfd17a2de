"""000's chapter 3 at its scale: pipelines of transformers of 12 to 100 billion parameters on Summit, by the roofline model.

The text gives neither the transformers' sizes nor the batch of the weak scaling study: sizes are taken that have the parameters and that
Table 3.1 divides, and 16,384 samples of 512 positions, with which the pipelines of Table 3.1 are full.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from axonn_plugins.pipeline.simulate import simulate
from axonn_plugins.planner import machine
from axonn_plugins.planner.axonn import model_flops
from axonn_plugins.planner.model import Transformer
from axonn_plugins.planner.report import DAY, GB
from axonn_plugins.planner.setting import Setting
from axonn_recipes.papers.configured import Run, Sizes, every, runs
from axonn_recipes.papers.data import Value
from axonn_recipes.papers.found import COUNTED, MODEL, Experiment, Found
from axonn_recipes.planner.outcome import lines

SIZES = {"12B": (48, 4512, 24, 48), "24B": (48, 6336, 36, 96), "50B": (96, 6528, 48, 192), "100B": (96, 9360, 60, 384)}
"""Layers, hidden size, heads, and GPUs."""
TABLE_3_1 = {
    "AxoNN": {"12B": (8, 1, 6, 8), "24B": (4, 1, 12, 8), "50B": (4, 1, 24, 8), "100B": (2, 1, 48, 8)},
    "DeepSpeed": {"12B": (2, 3, 2, 8), "24B": (2, 3, 4, 8), "50B": (1, 3, 16, 4), "100B": (1, 3, 32, 4)},
    "Megatron-LM": {"12B": (8, 3, 16, 1), "24B": (1, 3, 16, 2), "50B": (8, 6, 32, 1), "100B": (4, 12, 32, 1)},
}
"""Microbatch, G_intra, G_inter, G_data, which are given to the planner."""
BATCH, TOKENS = 16384, 300e9
BUCKET = 16e6
"""Parameters of a bucket of the offloaded optimizer (section 3.3.2)."""
SUMMIT = machine.load("summit")
CHECKPOINTED = Setting(recompute=True)


Bytes = Callable[[Run], float]


def of(name: str) -> Transformer:
    """One of `SIZES`."""
    layers, hidden, heads, _ = SIZES[name]
    return Transformer(name, layers, hidden, heads, sequence=512, vocabulary=51200)


def run_of(name: str, batch: int, sizes: Sizes) -> Run:
    """A configuration on Summit."""
    return runs(SUMMIT, of(name), batch, [sizes], CHECKPOINTED)[0]


def offloaded(run: Run) -> float:
    """Bytes of a GPU with AxoNN's bucketed optimizer: 4 bytes a parameter and a bucket's 16 (section 3.3.2), and activations."""
    return run.holds["weights"] + run.holds["gradients"] + 16 * BUCKET + run.holds["activations"]


def whole(run: Run) -> float:
    """Bytes of a GPU with all states on it: 20 a parameter (section 3.3.2), and activations."""
    return 20 * run.parameters + run.holds["activations"]


def sharded(run: Run) -> float:
    """Bytes of a GPU with ZeRO-1."""
    return sum(run.holds.values())


KEEPS: dict[str, Bytes] = {"AxoNN": offloaded, "DeepSpeed": sharded, "Megatron-LM": whole}


def weak_scaling(folder: Path) -> Found:
    """Figure 3.7: days for 300 billion tokens and percent of peak, each framework as Table 3.1 tuned it."""
    days: dict[str, list[float]] = {}
    peak: dict[str, list[float]] = {}
    for framework, rows in TABLE_3_1.items():
        for name, row in rows.items():
            seconds = run_of(name, BATCH, row).seconds
            rate = model_flops(of(name), BATCH) / seconds / SIZES[name][3]
            days.setdefault(framework, []).append(TOKENS / (BATCH * 512) * seconds / DAY)
            peak.setdefault(framework, []).append(100 * rate / SUMMIT.tensor)
    values: dict[str, Value] = {}
    for framework, shares in peak.items():
        values |= {f"{framework}: least": min(shares), f"{framework}: most": max(shares)}
    for number, name in enumerate(SIZES):
        values[f"{name}: days less than DeepSpeed"] = days["DeepSpeed"][number] - days["AxoNN"][number]
    for framework in ("DeepSpeed", "Megatron-LM"):
        values[f"100B: {framework}'s time over AxoNN's"] = days[framework][3] / days["AxoNN"][3]
    gpus = [size[3] for size in SIZES.values()]
    series = {framework: (gpus, times) for framework, times in days.items()}
    shares_of = {framework: (gpus, times) for framework, times in peak.items()}
    return Found(
        values,
        {
            "days": lines("300 billion tokens on Summit, predicted", "GPUs", "days", series),
            "peak": lines("12B to 100B on Summit, predicted", "GPUs", "% of peak", shares_of, False),
        },
    )


def tuned(folder: Path) -> Found:
    """Table 3.1: what the planner would tune each framework to, of what its memory holds."""
    values: dict[str, Value] = {}
    for framework, rows in TABLE_3_1.items():
        for name in rows:
            most = 1 if framework == "AxoNN" else 12
            configurations = every(of(name), SIZES[name][3], BATCH, most)
            found = runs(SUMMIT, of(name), BATCH, configurations, CHECKPOINTED)
            microbatch, *grid = next(run.sizes for run in found if KEEPS[framework](run) <= SUMMIT.memory)
            values |= {f"{name}, {framework}: grid": grid, f"{name}, {framework}: microbatch": microbatch}
    return Found(values)


def stages(folder: Path) -> Found:
    """Figures 3.3 and 3.4: 12B on 48 GPUs by G_inter, one sample a microbatch, 2048 samples, with and without room for fewer stages."""
    at = {inter: run_of("12B", 2048, (1, 1, inter, 48 // inter)) for inter in (6, 12, 24, 48)}
    phase = {inter: run.pipelining for inter, run in at.items()}
    slower = list(phase.values())
    many, few = at[24], at[6]
    values: dict[str, Value] = {
        "more stages take longer": slower == sorted(slower),
        "G_inter 24: pipelining": phase[24],
        "G_inter 6: pipelining": phase[6],
        "G_inter 24: data-parallel phase": many.parts["data"],
        "G_inter 6: data-parallel phase": few.parts["data"],
        "batch time saved": 100 * (1 - few.seconds / many.seconds),
        "model state of a GPU at G_inter 6, not offloaded": 20 * few.parameters / GB,
        "model state saved by offloading at G_inter 6": 10
        * few.holds["weights"]
        / (2 * few.holds["weights"] + 16 * BUCKET),
        "all GPUs at G_inter 24, not offloaded": 48 * whole(many) / GB,
        "all GPUs at G_inter 24, offloaded": 48 * offloaded(many) / GB,
    }
    picture = lines("12B on 48 GPUs, predicted", "G_inter", "s in the pipeline", {"12B": (list(phase), slower)})
    return Found(values, {"stages": picture})


def timeline(folder: Path) -> Found:
    """Figure 4.3: five microbatches on three stages, a unit forward and two backward."""
    run = simulate("1f1b", 3, 5, lambda stage, action: 1.0 if action.kind == "forward" else 2.0)
    return Found({"bubble of each GPU": run.seconds - 5 * 3.0})


EXPERIMENTS = {
    "stages_weak_scaling": Experiment(weak_scaling, MODEL, 2),
    "stages_tuned": Experiment(tuned, MODEL, 5),
    "stages_timeline": Experiment(timeline, COUNTED, 1),
    "stages_12b": Experiment(stages, MODEL, 1),
}
