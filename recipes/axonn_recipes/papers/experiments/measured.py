"""Measurements on this machine: benchmarks and recipes of the suite, run as their commands and read by their results.json."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axonn_plugins.cli.commands import find
from axonn_plugins.config import ConfigError
from axonn_recipes.papers.data import Value
from axonn_recipes.papers.experiments.grids import less
from axonn_recipes.papers.found import MEASURED, Experiment, Found, Short

Numbers = Callable[[dict[str, Any]], dict[str, Value]]


def command(line: str, numbers: Numbers, option: str = "--runs") -> Callable[[Path], Found]:
    """An experiment that is a command of ours.

    Args:
        line: the command without ``axonn``.
        numbers: what its results.json says, by the names of the rows.
        option: by which it is given a folder; with "--runs" it makes one in it.
    """

    def run(folder: Path) -> Found:
        words = shlex.split(line)
        given = ["--runs", str(folder.parent), "--name", folder.name] if option == "--runs" else [option, str(folder)]
        main, rest = find([*words, *given])
        if main(rest):
            raise ConfigError(f"axonn {line} has failed; run it by itself")
        found = json.loads((folder / "results.json").read_text())
        return Found(numbers(found), files=tuple(sorted(folder.glob("*.png"))), note=f"Run: `axonn {line}`.")

    return run


def _sides(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A benchmark's sides by name."""
    return {side["name"]: side for side in found["sides"]}


def _overlap(found: dict[str, Any]) -> dict[str, Value]:
    stages = [side for side in found["sides"] if side["kind"] == "stage"]
    times = [side["median"] for side in stages]
    exposed = [side["exposed_communication_s"] for side in stages]
    return {
        "two nodes here: all overlaps": less(times[-1], times[0]),
        "two nodes here: exposed communication falls with each overlap": exposed[0] > exposed[2] > exposed[3],
    }


def _peers(found: dict[str, Any]) -> dict[str, Value]:
    return {
        f"four nodes here: {pair['peer']} is slower": pair["ratio"] > 1 for pair in found["comparisons"] if pair["ours"]
    }


def _stages(found: dict[str, Any]) -> dict[str, Value]:
    times = [run["sides"][0]["median"] for run in found["runs"]]
    return {"eight nodes here: more stages take longer": times == sorted(times)}


def _memory(found: dict[str, Any]) -> dict[str, Value]:
    """The gain of room for fewer stages: the fewest, offloaded, beside the most, on the device."""
    few, many = (pick(found["runs"], key=lambda run: run["settings"]["stages"]) for pick in (min, max))
    return {"four nodes here: batch time saved": less(few["sides"][1]["median"], many["sides"][0]["median"])}


def _coarsening(found: dict[str, Any]) -> dict[str, Value]:
    together = {one["coarsening"]: statistics.median(one["together"]) for one in found["factors"]}
    best = min(together, key=lambda factor: together[factor])
    return {
        "two nodes here: the best coarsening factor is 2 or 4": best in (2, 4),
        "two nodes here: a factor of 1 is slower than the best": together[1] > together[best],
    }


def _ted(found: dict[str, Any]) -> dict[str, Value]:
    saved = {one["what"]: one["median"] for one in found["runs"][-1]["judged"]}
    share = lambda kind: 100 * next(value for what, value in saved.items() if what == f"{kind} time saved, +CAC")  # noqa: E731
    sides = _sides(found["runs"][-1])
    baseline = sides["TED baseline"]
    return {
        "four nodes here: both, all-to-all time": share("all-to-all"),
        "four nodes here: both, all-reduce time": share("all-reduce"),
        "four nodes here: all-to-alls, share of the baseline": 100
        * baseline["parts_median"]["all-to-all"]
        / baseline["median"],
        "four nodes here: dropping, all-to-all time": less(
            sides["+DTD"]["parts_median"]["all-to-all"], baseline["parts_median"]["all-to-all"]
        ),
    }


def _ted_scaling(found: dict[str, Any]) -> dict[str, Value]:
    quicker = [_sides(run)["+CAC"]["median"] < _sides(run)["TED baseline"]["median"] for run in found["runs"]]
    return {"1, 2 and 4 nodes here: faster than the baseline": all(quicker)}


def _train_zero_3(found: dict[str, Any]) -> dict[str, Value]:
    return {"eight nodes here: faster than the native library": all(one["speedup"] > 1 for one in found["clusters"])}


def _halving(found: dict[str, Any]) -> dict[str, Value]:
    cells = {
        (one["side"], one["nodes"], one["bytes"]): one["median"]
        for one in found["cells"]
        if one["collective"] == "reduce_scatter"
    }
    small = min(size for *_, size in cells)
    times = [cells[side, 8, small] for side in ("hierarchical_log_direct", "hierarchical_ring_direct")]
    return {"eight nodes here: halving is faster than the ring for little data": times[0] < times[1]}


def _cluster(found: dict[str, Any]) -> dict[str, Value]:
    return {"four nodes here: faster than dense": found["ratio"]["median"] > 1}


def _ranks(found: dict[str, Any]) -> dict[str, Value]:
    first = found["grids"][:10]  # in the order of their measured medians
    return {
        "eight ranks here: of the model's ten first, among the ten fastest": sum(
            one["formulas rank"] <= 10 for one in first
        )
    }


def _validation(found: dict[str, Any]) -> dict[str, Value]:
    """The verdict by the recipe's bound: 1e-6 or 5e-3, or twice what a serial run drifts whose first weights are an ulp off."""
    pairs = found["pairs"]
    return {
        f"{name} on 16 ranks here: losses are the serial model's": all(
            pair["good"] for pair in pairs if pair["model"] == name
        )
        for name in {pair["model"] for pair in pairs}
    }


def _perplexity(found: dict[str, Any]) -> dict[str, Value]:
    dense, pruned = (found["sides"][name]["final"] for name in ("dense", "pruned"))
    return {"here: the pruned model's perplexity over the dense one's": pruned / dense}


def _moe_curves(found: dict[str, Any]) -> dict[str, Value]:
    """Which expert a token goes to is not continuous, so that rounding grows: 1e-8 in the first steps, a thousandth at the end."""
    apart, final = found["differences"], found["sides"]["ted"]["final"]
    equal = max(apart["losses"][:10]) <= 1e-6 and max(apart["validation"]) <= 1e-3 * final
    return {"here: validation losses of both are equal but for rounding": equal}


def _pipeline_curves(found: dict[str, Any]) -> dict[str, Value]:
    return {"here: losses are those of one process": found["differences"]["serial"] <= 1e-3}


def _memorization(found: Mapping[str, Mapping[str, float]]) -> dict[str, Value]:
    standard, goldfish = found["standard"], found["goldfish"]
    return {
        "here: exact match grows with repetitions": standard["low"]
        <= standard["middle"]
        <= standard["high"]
        > standard["low"],
        "here: control": standard["control"],
        "here: goldfish, the most seen pages beside the control": max(goldfish.values()) - goldfish["control"],
    }


@dataclass(frozen=True)
class Command:
    """A command of ours and what is read of it.

    Attributes:
        line: without ``axonn`` and without what its forms differ in.
        numbers: what its results.json says, by the names of the rows.
        seconds: of the whole form, and of the short one.
        short: what the short form adds to the line.
        whole: what the whole form adds.
        option: that takes a folder.
        root: whether it emulates a cluster.
    """

    line: str
    numbers: Numbers
    seconds: tuple[float, float]
    short: str = "--rounds 2"
    whole: str = ""
    option: str = "--runs"
    root: bool = True

    @property
    def experiment(self) -> Experiment:
        """Both forms of the experiment."""
        forms = [
            command(f"{self.line} {added}".strip(), self.numbers, self.option) for added in (self.whole, self.short)
        ]
        return Experiment(forms[0], MEASURED, self.seconds[0], self.root, Short(forms[1], self.seconds[1]))


_LINK = "--latency 100us --bandwidth 500Mbit"
_UNET = '--hidden 64 --layers 1 --heads 4 --context 16 --grids "1,1,8 2,1,4"'
_LOG, _RING = "hierarchical_log_direct", "hierarchical_ring_direct"
_TWO_NODES = "--nodes 2 --ranks-per-node 1 --hidden 512 --latency 100us --bandwidth 700Mbit"
COMMANDS = {
    "overlap": Command(f"bench tp {_TWO_NODES} --grids 1,1,2 --peers fsdp2", _overlap, (120, 60)),
    "peers": Command(f"bench tp --nodes 4 {_LINK} --peers zero3,fsdp2", _peers, (400, 200)),
    "u_nets": Command(f"bench tp --model unet --nodes 4 {_LINK} {_UNET} --peers zero3,fsdp2", _peers, (400, 200)),
    "stages": Command("bench pipeline --figure stages --ranks 8 --layers 16", _stages, (120, 60)),
    "memory": Command("bench pipeline --figure memory", _memory, (60, 40)),
    "coarsening": Command("bench pipeline --figure coarsening --ranks 2 --bandwidth 500Mbit", _coarsening, (90, 60)),
    "ted": Command("bench ted", _ted, (120, 60), whole="--rounds 5"),
    "ted_strong": Command("bench ted --nodes 1,2,4 --scaling strong", _ted_scaling, (180, 90)),
    "ted_weak": Command("bench ted --nodes 1,2,4 --scaling weak", _ted_scaling, (180, 90)),
    "zero_3": Command("bench pccl --train", _train_zero_3, (240, 150)),
    "halving": Command(
        f"bench pccl --layouts 8x2 --sizes 64K,16M --algorithms {_LOG},{_RING}",
        _halving,
        (120, 60),
        "--collectives reduce_scatter --rounds 2",
    ),
    "samo_cluster": Command("bench samo_cluster", _cluster, (120, 60)),
    "ranks": Command(
        f"bench planner --nodes 2 --ranks-per-node 4 {_LINK} --layers 2 --context 64",
        _ranks,
        (240, 150),
        "--rounds 1",
        "--rounds 3",
    ),
    "validation": Command(
        "train validation",
        _validation,
        (1800, 120),
        "--dtype float64 --steps 10",
        "--size large --dtype float32 --minutes 30",
        option="--out",
        root=False,
    ),
    "samo_gpt": Command("train samo_gpt", _perplexity, (600, 200), "--steps 100", root=False),
    "ted_moe": Command("train ted_moe", _moe_curves, (600, 150), "--steps 30 --validate-every 15", root=False),
    "pipeline": Command("train pipeline", _pipeline_curves, (300, 60), "--steps 30", root=False),
    "memorization": Command("train memorization", _memorization, (720, 90), "--quick", root=False),
}
"""Benchmarks on an emulated cluster, and recipes that train on ranks of this machine."""
EXPERIMENTS = {f"measured_{name}": one.experiment for name, one in COMMANDS.items()}
