"""``axonn bench scale``: what a rank of thousands does at start, each cost with its growth, without the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from axonn_plugins.cli.options import read
from axonn_plugins.config import ConfigError
from axonn_plugins.observe.figures import Picture
from axonn_recipes.bench.output import aligned, publish
from axonn_recipes.bench_scale.growth import AT, BYTES, SECONDS
from axonn_recipes.bench_scale.measure import BYTES_UNIT, COUNT_UNIT, SECONDS_UNIT, Curve, measure, shown
from axonn_recipes.bench_scale.standin import grid_of
from axonn_recipes.options import Run
from axonn_recipes.runs import new_folder

QUICK = "64,256"
_AXES = {SECONDS_UNIT: "seconds of a core", BYTES_UNIT: "bytes", COUNT_UNIT: "requests, links"}


@dataclass(frozen=True, kw_only=True)
class Options(Run):
    """The start of a rank among thousands, each cost with its growth, without the machine.

    Attributes:
        ranks: numbers of ranks, with commas: powers of two from 64.
        quick: 64 and 256 ranks only and no memory, as a test that all of it runs.
        processes: so many real processes besides, which meet, and then lose one; 0 for none.
    """

    ranks: str = "256,512,1024,2048,4096,8192,16384,32768"
    quick: bool = False
    processes: int = 0


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    options = read(Options, arguments, "axonn bench scale")
    sizes = sizes_of(QUICK if options.quick else options.ranks)
    if options.processes < 0 or options.processes in (1, 2):
        raise ConfigError(f"--processes {options.processes} cannot lose one; give 3 or more, or 0 for none")
    print(f"{', '.join(map(str, sizes))} ranks, one process each time; {options.processes} real ones", flush=True)
    if options.dry_run:
        return 0
    folder = new_folder(options.runs, options.name, "bench_scale")
    curves = measure(sizes, 2, memory=False) if options.quick else measure(sizes)
    text, numbers = table(curves), {"ranks": sizes, "curves": [_numbers(curve) for curve in curves]}
    if options.processes:
        from axonn_recipes.bench_scale.processes import described, lose_one

        found = lose_one(options.processes)
        text += f"\n\n{described(found)}"
        numbers["processes"] = asdict(found)
    publish(folder, numbers, text, {"scale.png": Picture(lambda figure: draw(figure, curves), (9.0, 4.5))})
    return 0


def sizes_of(text: str) -> list[int]:
    """The numbers of ranks of an option.

    Raises:
        ConfigError: one is no power of two from 64.
    """
    try:
        sizes = sorted({int(word) for word in text.split(",")})
        for size in sizes:
            grid_of(size)
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 64:
        raise ConfigError(f'--ranks "{text}" is not a list of powers of two from 64; write it as in 256,1024,4096')
    return sizes


def table(curves: Sequence[Curve]) -> str:
    """A line a curve: its first and last cost, its growth, and whether it is within the bars."""
    first, last = min(curves[0].costs), max(curves[0].costs)
    rows = [["", f"{first:,} ranks", f"{last:,} ranks", f"at {AT:,}", "growth", "within the bars"]]
    for curve in curves:
        verdict = curve.verdict
        rows.append(
            [
                f"{curve.what}{', memory' if curve.unit == BYTES_UNIT else ''}",
                *(shown(curve.costs[ranks], curve.unit) if ranks in curve.costs else "-" for ranks in (first, last)),
                ("" if verdict.measured else "~") + shown(verdict.value, curve.unit),
                verdict.growth.word,
                "yes" if verdict.met else "NO",
            ]
        )
    missed = sum(not curve.verdict.met for curve in curves)
    ends = f"{len(curves) - missed} of {len(curves)} curves are within the bars: below p^1.5, and {SECONDS:g} s and {BYTES / 2**20:g} MiB at {AT:,} ranks"
    return f"{aligned(rows)}\n\n{ends}; ~ is by the fit"


def draw(figure: Any, curves: Sequence[Curve]) -> None:
    """All curves, times, bytes and counts apart, on two logarithmic axes."""
    for axes, (unit, title) in zip(figure.subplots(1, 3), _AXES.items(), strict=True):
        for curve in curves:
            if curve.unit == unit:
                ranks = sorted(curve.costs)
                axes.plot(ranks, [curve.costs[each] for each in ranks], marker=".", linewidth=1, label=curve.what)
        axes.set(xscale="log", yscale="log", xlabel="ranks", title=title)
        axes.legend(fontsize=4)


def _numbers(curve: Curve) -> dict[str, Any]:
    verdict = curve.verdict
    return {
        "what": curve.what,
        "unit": curve.unit,
        "costs": {str(ranks): cost for ranks, cost in curve.costs.items()},
        "growth": asdict(verdict.growth),
        f"at {AT}": verdict.value,
        "measured": verdict.measured,
        "met": verdict.met,
    }
