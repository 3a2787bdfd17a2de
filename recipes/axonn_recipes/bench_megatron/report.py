"""The report of a run: a table, and time per step against ranks as in Figure 11 of paper 003."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from axonn_plugins.observe.figures import Picture
from axonn_recipes.bench.numbers import ratio
from axonn_recipes.bench.output import compared, extremes, mib, table, three
from axonn_recipes.bench_megatron.measure import Run
from axonn_recipes.bench_megatron.settings import Settings
from axonn_recipes.megatron_gpt.settings import Settings as Training

MEGATRON, OURS = "Megatron", "AxoNN"


@dataclass
class Side:
    """One side and what was measured of it.

    Attributes:
        system: `MEGATRON` or `OURS`.
        name: how it splits the ranks, and what is turned on.
        training: the run.
        seconds: a step's, by round: the median of that round's steps, each the slowest rank's.
        run: the last round's.
        sent: bytes that the rank which sends most sends in a step, by axis.
    """

    system: str
    name: str
    training: Training
    seconds: list[float] = field(default_factory=list)
    run: Run = field(default_factory=Run)
    sent: dict[str, float] = field(default_factory=dict)

    @property
    def losses(self) -> list[float]:
        """Losses of the last round."""
        return self.run.losses


def results(point: Settings, sides: list[Side], tried: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Everything measured at one point, as what JSON can hold; seconds and bytes.

    Args:
        point: what was measured.
        sides: the first is Megatron with nothing turned on.
        tried: seconds of every way that was tried, by system and name.
    """
    chosen = {system: best(sides, system) for system in (MEGATRON, OURS)}
    return {
        "settings": {**asdict(point), "ranks": point.ranks},
        "torch": torch.__version__,
        "sides": [
            {
                **{"system": side.system, "name": side.name, "seconds": side.seconds},
                **{"median": statistics.median(side.seconds), "sent": side.sent, "between": side.run.between},
            }
            for side in sides
        ],
        "best": {system: side.name for system, side in chosen.items()},
        "ratio": ratio(chosen[MEGATRON].seconds, chosen[OURS].seconds),
        "ratio_as_it_comes": ratio(sides[0].seconds, chosen[OURS].seconds),
        "tried": tried,
    }


def best(sides: list[Side], system: str) -> Side:
    """A system's fastest side."""
    return min((side for side in sides if side.system == system), key=lambda side: statistics.median(side.seconds))


def text(points: list[dict[str, Any]]) -> str:
    """The report of all points, as text."""
    return "\n\n".join(point_text(point) for point in points)


def point_text(numbers: dict[str, Any]) -> str:
    """The sides of one point, what each sends along which axis, and the ratio."""
    shown = table(
        {
            "": lambda side: f"{side['system']}, {side['name']}",
            "step s": lambda side: three(side["median"]),
            "min-max": lambda side: extremes(side["seconds"], three),
            "MiB between": lambda side: mib(side["between"]),
            "MiB that a rank sends, by axis": lambda side: ", ".join(
                f"{axis} {mib(value, 2)}" for axis, value in side["sent"].items()
            ),
        },
        numbers["sides"],
    )
    lines = [
        "",
        f"Megatron / AxoNN, each at its best: {compared(numbers['ratio'])}",
        f"Megatron / AxoNN, Megatron with nothing turned on: {compared(numbers['ratio_as_it_comes'])}",
    ]
    for system, tried in numbers["tried"].items():
        ordered = sorted(tried.items(), key=lambda pair: pair[1])
        lines.append(f"{system} tried, s: " + "; ".join(f"{name} {seconds:.3f}" for name, seconds in ordered))
    return "\n".join([shown, *lines])


def pictures(points: list[dict[str, Any]]) -> dict[str, Picture]:
    """Time per step against ranks, a bar a system; above a pair, what is hidden size and ratio."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for at, point in enumerate(points):
            for offset, (system, color) in enumerate(((MEGATRON, "tab:orange"), (OURS, "tab:blue"))):
                side = next(each for each in point["sides"] if each["name"] == point["best"][system])
                place, middle = at + 0.38 * offset - 0.19, side["median"]
                reach = [[middle - min(side["seconds"])], [max(side["seconds"]) - middle]]
                axes.bar(place, middle, 0.36, color=color, label=system if at == 0 else None)
                axes.errorbar(place, middle, reach, color="black", capsize=3)
            highest = max(max(side["seconds"]) for side in point["sides"])
            axes.text(at, highest, f"{point['ratio']['median']:.2f}x", ha="center", va="bottom")
        labels = [f"{point['settings']['ranks']}\nhidden {point['settings']['hidden']}" for point in points]
        axes.set_xticks(range(len(points)), labels)
        axes.set_xlabel("ranks")
        axes.set_ylabel("time per step (s)")
        axes.margins(y=0.15)
        axes.legend()

    return {"figure_11.png": Picture(draw, (3 + 1.6 * len(points), 4.2))}
