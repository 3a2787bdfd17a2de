"""000's chapter 4 at its scale: AxoNN, AxoNN with SAMO, and DeepSpeed-3D on Summit, by the roofline model; and the chapter's formulas.

AxoNN keeps 20 bytes a parameter on each GPU and SAMO 4.4 (equation 4.3), so SAMO has fewer stages. Nodes of six GPUs do not divide
powers of two: domains of two are taken. What compressing gradients costs is not modelled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from axonn_plugins.planner import machine, model
from axonn_plugins.planner.axonn import model_flops
from axonn_plugins.planner.collectives import Kind, seconds
from axonn_plugins.planner.setting import Setting
from axonn_plugins.samo.memory_cli import picture
from axonn_recipes.models.vgg import VGG, VGGConfig
from axonn_recipes.models.wide_resnet import WideResNet, WideResNetConfig
from axonn_recipes.papers.configured import Run, every, runs
from axonn_recipes.papers.data import Value
from axonn_recipes.papers.experiments.grids import less
from axonn_recipes.papers.found import COUNTED, MODEL, Experiment, Found
from axonn_recipes.planner.outcome import lines
from samo import memory

SUMMIT = machine.load("summit-nvs2")
SPARSITY = 0.9
STUDY = {
    "XL": ("gpt3-xl", 512, 64),
    "2.7B": ("gpt3-2.7b", 512, 64),
    "6.7B": ("gpt3-6.7b", 1024, 128),
    "13B": ("gpt3-13b", 2048, 256),
}
"""Table 4.1: model, batch, and the fewest GPUs; the most are eight times as many."""
SYSTEMS = ("AxoNN", "AxoNN+SAMO", "DeepSpeed-3D")
IMAGES = 128


def _fits(system: str, run: Run) -> bool:
    if system == "DeepSpeed-3D":  # ZeRO-1
        return sum(run.holds.values()) <= SUMMIT.memory
    state = memory.dense_bytes(1) if system == "AxoNN" else memory.paper_bytes(1, SPARSITY)
    return state * run.parameters + run.holds["activations"] <= SUMMIT.memory


@cache
def fastest(system: str, name: str, gpus: int) -> Run:
    """The fastest configuration of a system that fits; DeepSpeed-3D splits tensors within a node, too."""
    trained, batch, _ = STUDY[name]
    of = model.load(trained)
    assert isinstance(of, model.Transformer)
    setting = Setting(recompute=True, sparsity=SPARSITY if system == "AxoNN+SAMO" else 0.0)
    configurations = every(of, gpus, batch, 6 if system == "DeepSpeed-3D" else 1, even=False)
    return next(run for run in runs(SUMMIT, of, batch, configurations, setting) if _fits(system, run))


def _gpus(name: str) -> list[int]:
    return [STUDY[name][2] * 2**step for step in range(4)]


def strong_scaling(*names: str) -> Callable[[Path], Found]:
    """Figures 4.6 and 4.7: percent of the time that SAMO saves, over the numbers of GPUs."""

    def run(folder: Path) -> Found:
        values: dict[str, Value] = {}
        pictures = {}
        for name in names:
            times = {system: [fastest(system, name, gpus).seconds for gpus in _gpus(name)] for system in SYSTEMS}
            for other in ("AxoNN", "DeepSpeed-3D"):
                saved = [less(*pair) for pair in zip(times["AxoNN+SAMO"], times[other], strict=True)]
                values |= {f"{name} over {other}: least": min(saved), f"{name} over {other}: most": max(saved)}
            series = {system: (_gpus(name), each) for system, each in times.items()}
            pictures[name] = lines(f"GPT-3 {name} on Summit, predicted", "GPUs", "s a batch", series)
        return Found(values, pictures)

    return run


def peak(folder: Path) -> Found:
    """Table 4.2: percent of peak, GPT-3 13B."""
    flops = model_flops(model.load("gpt3-13b"), STUDY["13B"][1])
    values: dict[str, Value] = {
        f"{system}, {gpus} GPUs": 100 * flops / fastest(system, "13B", gpus).seconds / gpus / SUMMIT.tensor
        for gpus in _gpus("13B")
        for system in SYSTEMS
    }
    return Found(values)


def breakdown(folder: Path) -> Found:
    """Figure 4.8: of AxoNN's batch, the share by which SAMO shortens each phase of GPT-3 2.7B."""
    values: dict[str, Value] = {}
    for gpus in (128, 256, 512):
        dense, ours = (fastest(system, "2.7B", gpus) for system in ("AxoNN", "AxoNN+SAMO"))
        for part, what in (("pipeline", "point-to-point"), ("bubble", "bubble"), ("data", "collective")):
            values[f"{gpus} GPUs: {what}"] = 100 * (dense.parts[part] - ours.parts[part]) / dense.seconds
    return Found(values)


def images(folder: Path) -> Found:
    """Figure 4.5: data-parallel CNNs, 128 images over 16 to 128 GPUs: arithmetic at 80 % of the peak, and the gradients' all-reduce."""
    values: dict[str, Value] = {}
    spent: dict[str, float] = {}
    with torch.device("meta"):
        made = {"WideResnet-101": WideResNet(WideResNetConfig()), "VGG-19": VGG(VGGConfig())}
        pixels = torch.empty(1, 3, 224, 224)
    for name, network in made.items():
        counter = FlopCounterMode(display=False)
        with counter:
            network(pixels)
        spent[name] = 3 * counter.get_total_flops() / (SUMMIT.flop_efficiency * SUMMIT.tensor)
        parameters = sum(one.numel() for one in network.parameters())
        saved = []
        for gpus in (16, 32, 64, 128):
            reduced = [
                float(2 * seconds(SUMMIT, Kind.GATHER, 2 * share * parameters, gpus, 2))
                for share in (1.0, 1 - SPARSITY)
            ]
            compute = IMAGES / gpus * spent[name]
            saved.append(less(compute + reduced[1], compute + reduced[0]))
        values |= {f"{name}: least": min(saved), f"{name}: most": max(saved)}
        values[f"{name}: parameters"] = parameters / 1e6
    values["compute of WideResnet-101 over VGG-19"] = spent["WideResnet-101"] / spent["VGG-19"]
    return Found(values)


def saving(folder: Path) -> Found:
    """Figure 4.2 and equation 4.5: share of model state that SAMO saves, and where it begins to."""
    saved = lambda sparsity: 100 * memory.paper_saving(1, sparsity) / memory.dense_bytes(1)  # noqa: E731
    even = next(percent for percent in range(101) if saved(percent / 100) >= 0) / 100
    values: dict[str, Value] = {"at 80 % sparsity": saved(0.8), "at 90 % sparsity": saved(0.9), "breaks even at": even}
    values["dense state a parameter"] = memory.dense_bytes(1)
    return Found(values, {"saved": picture()})


EXPERIMENTS = {
    "pruned_xl_2.7b": Experiment(strong_scaling("XL", "2.7B"), MODEL, 5),
    "pruned_6.7b_13b": Experiment(strong_scaling("6.7B", "13B"), MODEL, 8),
    "pruned_peak": Experiment(peak, MODEL, 5),
    "pruned_breakdown": Experiment(breakdown, MODEL, 3),
    "pruned_images": Experiment(images, MODEL, 3),
    "pruned_saving": Experiment(saving, COUNTED, 4),
}
