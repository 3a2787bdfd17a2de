"""003's comparison at its scale: AxoNN, ZeRO-3, and Megatron-LM and DeepSpeed-3D, on Perlmutter and Frontier.

ZeRO-3 is the 4D grid that splits over z alone; Megatron-LM and DeepSpeed-3D are the fastest of tensor x pipeline x data parallelism with
tensors over a node, by the calibrated model, DeepSpeed-3D without fused attention, which its code of 2021 does not have. The text gives
no batch: 4M tokens are taken for GPTs, 2048 images for U-Nets.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from axonn_plugins.planner import machine, model
from axonn_plugins.planner.axonn import model_flops
from axonn_plugins.planner.search import Constraints, Plan, search
from axonn_plugins.planner.setting import Setting
from axonn_recipes.papers.data import Value
from axonn_recipes.papers.experiments.grids import MODE, best, less
from axonn_recipes.papers.found import MODEL, Experiment, Found
from axonn_recipes.planner.outcome import lines

BATCH = 2048
SERIES = ((64, "5b"), (128, "10b"), (256, "20b"), (512, "40b"), (1024, "80b"))
U_NETS = ((64, "250m"), (128, "500m"), (256, "1b"), (512, "2b"), (1024, "4b"))
THREE_D = ("Megatron-LM", "DeepSpeed-3D")


@dataclass(frozen=True)
class Step:
    """A step of one framework: all its seconds, and those of communication that nothing hides."""

    seconds: float
    exposed: float


def steps(where: str, trained: str, gpus: int, batch: int = BATCH) -> dict[str, Step]:
    """Seconds of a step by framework; those of tensor x pipeline x data parallelism for transformers alone."""
    found = {}
    for name, fixed in (("AxoNN", {}), ("ZeRO-3", {"gx": 1, "gy": 1, "gdata": 1})):
        plan = best(where, trained, gpus, batch, fixed=fixed)
        found[name] = Step(plan.seconds, plan.parts["tensor"] + plan.parts["data"])
    of = model.load(trained)
    if isinstance(of, model.Transformer):
        on = machine.load(where)
        for name in THREE_D:
            setting = Setting(recompute=True, whole=True, fused=name == "Megatron-LM")
            within = Constraints({"n1": on.domain})
            other = search(on, of, "1d", gpus, batch, MODE, 1, within, setting).best[0]
            assert isinstance(other, Plan)
            found[name] = Step(other.seconds, sum(other.parts[part] for part in ("tensor", "data", "pipeline")))
    return found


def weak_scaling(folder: Path) -> Found:
    """Table III and Figure 11: 5B on 64 to 80B on 1024 GPUs."""
    values: dict[str, Value] = {}
    pictures = {}
    ours: list[float] = []
    zero: list[float] = []
    for where in ("perlmutter", "frontier"):
        series: dict[str, tuple[list[int], list[float]]] = {}
        for gpus, size in SERIES:
            found = steps(where, f"gpt-{size}", gpus)
            flops = model_flops(model.load(f"gpt-{size}"), BATCH) / gpus / machine.load(where).tensor
            for name, step in found.items():
                if where == "perlmutter":
                    values[f"{name}, {size.upper()} on {gpus}"] = 100 * flops / step.seconds
                places, times = series.setdefault(name, ([], []))
                places.append(gpus)
                times.append(step.seconds)
            if where == "perlmutter":
                ours.append(less(found["AxoNN"].seconds, found["Megatron-LM"].seconds))
                zero.append(less(found["AxoNN"].seconds, found["ZeRO-3"].seconds))
        pictures[where] = lines(f"Weak scaling on {where.capitalize()}, predicted", "GPUs", "s a batch", series)
    values |= {
        "Perlmutter: over Megatron-LM, least": min(ours),
        "Perlmutter: over Megatron-LM, most": max(ours),
        "Perlmutter: over ZeRO-3, 10B to 40B, least": min(zero[1:4]),
        "Perlmutter: over ZeRO-3, 10B to 40B, most": max(zero[1:4]),
        "Perlmutter: over ZeRO-3, 80B on 1024": zero[4],
    }
    return Found(values, pictures)


def strong_scaling(folder: Path) -> Found:
    """Figures 9 and 10: 80B on 64 to 1024 GPUs, and what is exposed on 1024 GCDs of Frontier."""
    values: dict[str, Value] = {}
    pictures = {}
    for where in ("perlmutter", "frontier"):
        series: dict[str, tuple[list[int], list[float]]] = {}
        for gpus, _ in SERIES:
            # 80B and its optimizer's state fill 64 GPUs of 40 GB.
            try:
                found = steps(where, "gpt-80b", gpus)
            except LookupError:
                continue
            for name, step in found.items():
                places, times = series.setdefault(name, ([], []))
                places.append(gpus)
                times.append(step.seconds)
        pictures[where] = lines(f"80B on {where.capitalize()}, predicted", "GPUs", "s a batch", series)
        for name in ("ZeRO-3", *THREE_D):
            values[f"{where.capitalize()}, 1024: over {name}"] = less(found["AxoNN"].seconds, found[name].seconds)
        if where == "frontier":
            values |= {f"{name}: exposed communication": step.exposed for name, step in found.items()}
    return Found(values, pictures)


def u_nets(folder: Path) -> Found:
    """Figure 12: U-Nets of 250M to 4B parameters on 64 to 1024 GPUs, beside ZeRO-3."""
    values: dict[str, Value] = {}
    pictures = {}
    for where in ("perlmutter", "frontier"):
        found = {gpus: steps(where, f"unet-{size}", gpus) for gpus, size in U_NETS}
        ratios = {gpus: one["ZeRO-3"].seconds / one["AxoNN"].seconds for gpus, one in found.items()}
        values[f"{where.capitalize()}: ZeRO-3's time over ours, most on 512 and 1024"] = max(ratios[512], ratios[1024])
        values[f"{where.capitalize()}: ours is the faster for every U-Net"] = min(ratios.values()) > 1
        series = {name: (list(found), [one[name].seconds for one in found.values()]) for name in ("AxoNN", "ZeRO-3")}
        pictures[where] = lines(f"U-Nets on {where.capitalize()}, predicted", "GPUs", "s a batch", series)
    return Found(values, pictures)


EXPERIMENTS = {
    "frameworks_weak": Experiment(weak_scaling, MODEL, 5),
    "frameworks_strong": Experiment(strong_scaling, MODEL, 5),
    "frameworks_u_nets": Experiment(u_nets, MODEL, 5),
}
