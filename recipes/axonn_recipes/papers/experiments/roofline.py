"""The figures and tables of 004, by the roofline model in paper mode: what `axonn train planner` runs, as numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from axonn_plugins.planner import machine, model
from axonn_plugins.planner.report import GB
from axonn_plugins.planner.transformer import STRATEGIES, Operation, Strategy, local, operations
from axonn_recipes.papers.data import Value
from axonn_recipes.papers.found import COUNTED, MODEL, Experiment, Found
from axonn_recipes.planner import figures
from axonn_recipes.planner.outcome import Outcome

Rows = Sequence[Mapping[str, Any]]


def of(
    outcomes: Mapping[str, Callable[[], Outcome]], numbers: Callable[..., dict[str, Value]]
) -> Callable[[Path], Found]:
    """An experiment of several figures: their pictures, and numbers from the rows of each."""

    def run(folder: Path) -> Found:
        made = {name: outcome() for name, outcome in outcomes.items()}
        pictures = {name: outcome.picture for name, outcome in made.items()}
        return Found(numbers(*(outcome.rows for outcome in made.values())), pictures)

    return run


def fastest(rows: Rows, room: float = float("inf")) -> Mapping[str, Any]:
    """The row that takes least time, of those whose GB are at most `room`."""
    return min((one for one in rows if one["GB"] <= room), key=lambda one: one["seconds"])


def _by_gpus(rows: Rows) -> dict[str, Mapping[str, Any]]:
    return {one["GPUs"]: one for one in rows}


def _figure_1(rows: Rows) -> dict[str, Value]:
    best = fastest(rows)
    return {
        "(m, nt, nd, np) at the least time": [best["microbatches"], best["n1"], best["nd"], best["np"]],
        "memory there": best["GB"],
    }


def _figure_2(a: Rows, b: Rows) -> dict[str, Value]:
    room = machine.load("b200").memory / GB
    return {
        "np at the least time, domains of 8": fastest(a, room)["np"],
        "np at the least time, domains of 64": fastest(b, room)["np"],
    }


def _figure_3(a: Rows, b: Rows) -> dict[str, Value]:
    return {
        f"fastest (n1, n2, np), domains of {domain}": [best["n1"], best["n2"], best["np"]]
        for domain, best in ((8, fastest(a)), (64, fastest(b)))
    }


def _figure_4(gpt: Rows, vit: Rows) -> dict[str, Value]:
    at = _by_gpus(gpt)
    grids = [(one["n1"], one["n2"]) for one in vit]
    common = max(set(grids), key=grids.count)
    parts = [key for key in gpt[0] if key.endswith(" %")]
    return {
        "GPT3-1T, 2048 GPUs: (nNVS1, nNVSp)": [at["2048"]["v1"], at["2048"]["vp"]],
        "GPT3-1T, 1024 GPUs: (nNVS1, nNVSd, nNVSp)": [at["1024"][key] for key in ("v1", "vd", "vp")],
        "GPT3-1T, 8192 GPUs: nNVS1": at["8192"]["v1"],
        "GPT3-1T, 16384 GPUs: nNVS1": at["16384"]["v1"],
        "GPT3-1T: compute is the largest part on every number of GPUs": all(
            max(parts, key=lambda part: one[part]).startswith("compute") for one in gpt
        ),
        "ViT: the most common (n1, n2)": list(common),
    }


def _figure_5(gpt: Rows, vit: Rows) -> dict[str, Value]:
    days = {(one["machine"], one["GPUs"]): one["days"] for one in gpt}
    b200 = [days[f"b200-nvs{domain}", 16384] for domain in (4, 8, 64)]
    large = {(one["machine"], one["GPUs"]): one["days"] for one in vit}
    return {
        "GPT3-1T on 16384 A100, domains of 8": days["a100-nvs8", 16384],
        "GPT3-1T on 16384 B200, the fewest": min(b200),
        "GPT3-1T on 16384 B200, the most": max(b200),
        "ViT on 16384 B200: larger domains take less time": large["b200-nvs64", 16384]
        < large["b200-nvs8", 16384]
        < large["b200-nvs4", 16384],
    }


def _appendix_1(rows: Rows) -> dict[str, Value]:
    values: dict[str, Value] = {
        "4 GPUs a node gather faster than 2": all(one["seconds, 4 a node"] < one["seconds, 2 a node"] for one in rows)
    }
    for one, near in product(rows, (2, 4)):
        values[f"{near} a node, {one['bytes'] / 2**20:g} MiB"] = 1e3 * one[f"seconds, {near} a node"]
    return values


def _appendix_2(gpt: Rows, vit: Rows) -> dict[str, Value]:
    return {
        "GPT3-1T in 2D: np of what takes most memory": max(gpt, key=lambda one: one["GB"])["np"],
        "ViT in 2D: np of the fastest": fastest(vit)["np"],
    }


def _appendix_3(one: Rows, summa: Rows) -> dict[str, Value]:
    flat = [row["n2"] == 1 for row in summa]
    at = _by_gpus(one)
    return {
        "1D, 16384 GPUs: fewer stages than with domains of 8": at["16384"]["np"]
        < _by_gpus(figures.figure_4a().rows)["16384"]["np"],
        "SUMMA chooses n2 = 1 at most scales": sum(flat) > len(flat) / 2,
        "SUMMA splits positions on 16384 GPUs": not flat[-1],
    }


def _appendix_4(rows: Rows) -> dict[str, Value]:
    gains = [100 * (one[key] - 1) for one in rows for key in ("2d over 1d", "summa over 1d") if one[key]]
    low, high = np.percentile(gains, [25, 75])
    return {"speedup over 1D, lower quartile": float(low), "speedup over 1D, upper quartile": float(high)}


def _days(rows: Rows, **at: float) -> float:
    chosen = [
        one for one in rows if all(any(key in name and one[name] == size for name in one) for key, size in at.items())
    ]
    return chosen[0]["days"]


def _appendix_5(gpt: Rows, vit: Rows) -> dict[str, Value]:
    gain = [
        (
            _days(rows, tensor=1, memory=1) / _days(rows, tensor=4, memory=1),
            _days(rows, tensor=1, memory=1) / _days(rows, tensor=1, memory=4),
        )
        for rows in (gpt, vit)
    ]
    return {
        "GPT3-1T: 4 times the flop rate gains more than 4 times the memory": gain[0][0] > gain[0][1],
        "ViT gains more from memory than GPT3-1T": gain[1][1] > gain[0][1],
    }


def _appendix_6(gpt: Rows, vit: Rows) -> dict[str, Value]:
    spread = [max(days) / min(days) for days in ([one["days"] for one in rows if one["days"]] for rows in (gpt, vit))]
    return {"ViT is the more sensitive to memory": spread[1] > spread[0]}


def tables(folder: Path) -> Found:
    """Tables I, II and A2: collectives of a layer and the volume of each, by the split."""
    trained = model.load("gpt3-1t")
    assert isinstance(trained, model.Transformer)
    values: dict[str, Value] = {}
    whole = 2.0 * trained.sequence * trained.hidden
    for strategy in STRATEGIES:
        found = _of_layer(trained, strategy, 4, 1 if strategy == "1d" else 8)
        values[f"{strategy}: collectives of a layer's forward"] = sum(len(one.forward) for one in found)
        for name in ("layer norm", "fc2", "attention"):
            sent = [float(each.volume) / whole for one in found if one.name == name for each in one.forward]
            values[f"{strategy}: volume of {name}"] = sent[0] if sent else 0.0
    return Found(values)


def _of_layer(trained: model.Transformer, strategy: Strategy, n1: int, n2: int) -> list[Operation]:
    """A layer's operations on n1 x n2 GPUs, one sample; of collectives those of groups of more than one rank."""
    size = local(trained, strategy, "paper", *(np.float64(one) for one in (n1, n2, 1, 1)))
    return [
        Operation(one.name, one.unit, one.work, tuple(each for each in one.forward if (n1, n2)[each.axis == "n2"] > 1))
        for one in operations(trained, strategy, "paper", size, 1.0)
    ]


def hardware(folder: Path) -> Found:
    """Table A3: what the machines' files say."""
    values: dict[str, Value] = {}
    for name in ("a100", "h200", "b200"):
        on = machine.load(name)
        for what, value in {
            "tensor cores, TFLOP/s": on.tensor / 1e12,
            "vector units, TFLOP/s": on.vector / 1e12,
            "flop latency, s": on.flop_latency,
            "HBM bandwidth, GB/s": on.memory_bandwidth / GB,
            "HBM, GB": on.memory / GB,
            "NVS bandwidth, GB/s": on.fast_bandwidth / GB,
            "NVS latency, s": on.fast_latency,
            "IB bandwidth, GB/s": on.slow_bandwidth / GB,
            "IB latency, s": on.slow_latency,
        }.items():
            values[f"{name.upper()}: {what}"] = value
    return Found(values)


EXPERIMENTS = {
    "roofline_1": Experiment(of({"figure": figures.figure_1}, _figure_1), MODEL, 1),
    "roofline_2": Experiment(of({"a": figures.figure_2a, "b": figures.figure_2b}, _figure_2), MODEL, 1),
    "roofline_3": Experiment(of({"a": figures.figure_3a, "b": figures.figure_3b}, _figure_3), MODEL, 1),
    "roofline_4": Experiment(of({"a": figures.figure_4a, "b": figures.figure_4b}, _figure_4), MODEL, 1),
    "roofline_5": Experiment(of({"a": figures.figure_5a, "b": figures.figure_5b}, _figure_5), MODEL, 3),
    "roofline_a1": Experiment(of({"figure": figures.appendix_1}, _appendix_1), MODEL, 1),
    "roofline_a2": Experiment(of({"a": figures.appendix_2a, "b": figures.appendix_2b}, _appendix_2), MODEL, 1),
    "roofline_a3": Experiment(of({"a": figures.appendix_3a, "b": figures.appendix_3b}, _appendix_3), MODEL, 2),
    "roofline_a4": Experiment(of({"figure": figures.appendix_4}, _appendix_4), MODEL, 6),
    "roofline_a5": Experiment(of({"a": figures.appendix_5a, "b": figures.appendix_5b}, _appendix_5), MODEL, 2),
    "roofline_a6": Experiment(of({"a": figures.appendix_6a, "b": figures.appendix_6b}, _appendix_6), MODEL, 2),
    "roofline_tables": Experiment(tables, COUNTED, 1),
    "roofline_hardware": Experiment(hardware, COUNTED, 1),
}
