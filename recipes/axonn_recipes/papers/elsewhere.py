"""Published numbers that other data files have, too: the planner's corpus, the collectives', an all-gather's times. Both must say the same."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

from axonn_plugins.pccl import published
from axonn_plugins.planner import corpus, files
from axonn_plugins.planner.uncertainty import LARGE
from axonn_recipes.planner import figures

NEAR = 0.01
"""Share by which they may be apart, for one is rounded, or the other's inverse."""
_BASES = {"gpt3-xl": "1.3B", "gpt3-2.7b": "2.7B", "gpt3-6.7b": "6.7B", "gpt3-13b": "13B"}


class Other(NamedTuple):
    """A number as another file has it."""

    file: str
    value: float

    def contradicts(self, value: object) -> bool:
        """True if it is not the number that the rows have."""
        return not isinstance(value, int | float) or abs(value - self.value) > NEAR * abs(self.value)


@cache
def elsewhere() -> dict[str, Other]:
    """Numbers that stand in other data files, by the names that the rows have for them."""
    found = dict((*_collectives(), *_all_gather()))
    for name in ("gordon_bell", "four_frameworks", "experts", "pruned"):
        for one in corpus.read(files.ours("corpus")[name]):
            size = one.model.removeprefix("gpt-").upper()
            what = {
                "gordon_bell": f"{one.machine.capitalize()} {one.gpus}, {size}: Pflop/s",
                "four_frameworks": f"{one.framework}, {size} on {one.gpus}",
                "experts": f"{_BASES.get(one.model)} on {one.gpus} GPUs",
                "pruned": f"{one.framework}, {one.gpus} GPUs",
            }[name]
            found[what] = Other(f"planner/corpus/{name}.toml", one.value)
    return found


def _all_gather() -> Iterator[tuple[str, Other]]:
    measured = figures.all_gather()
    for near in (2, 4):
        for size, taken in zip(measured["bytes"], measured[f"{near} a node"], strict=True):
            if size >= LARGE:
                yield f"{near} a node, {size / 2**20:g} MiB", Other("recipes/planner/all_gather.toml", taken / 1e3)


def _collectives() -> Iterator[tuple[str, Other]]:
    for one in (*published.published("Frontier"), *published.published("Perlmutter")):
        figure, (least, most) = one.place.rpartition(" ")[2], one.megabytes
        ours = {"RCCL": "RCCL", "NCCL": "NCCL", "Cray MPICH": "MPICH"}[one.over]
        names = [collective.replace("_", "-") for collective in one.collectives]
        whats: dict[str, float] = {}
        if figure == "6.2":
            whats["all-gather on 32 GCDs, 256 and 512 MB: MPICH over RCCL"] = one.low
        elif figure == "6.3":
            whats = _span("reduce-scatter: MPICH over RCCL", one)
        elif figure == "6.7":
            whats = _span(f"all-gather on 2048, 64 to 512 MB: over {ours}", one)
        elif figure == "6.9":
            sizes = [size for size in (16, 32, 64, 512, 1024) if least <= size <= most]
            whats = {f"{name}, {one.processes[0]} GCDs, {size} MB": one.low for name, size in product(names, sizes)}
        elif figure == "6.10" or (figure == "6.11" and (least, most) == (16, 32)):
            whats = _span(f"1024 and 2048 GPUs, {least} and {most} MB: over {ours}", one)
        elif figure == "6.11" and most < 1024:
            whats = _span(f"2048 GPUs, {least} to {most} MB: over {ours}", one)
        elif figure == "6.11":
            whats["32 GPUs, 1024 MB: NCCL's speed over ours"] = 1 / one.low
        for what, value in whats.items():
            yield what, Other("pccl/published.toml", value)


def _span(what: str, one: published.Published) -> dict[str, float]:
    return {f"{what}, least": one.low, f"{what}, most": one.high}
